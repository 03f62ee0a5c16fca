// The chat: a conversation kept for this tab, answers streamed, and figures read once a second.
// Answers come as spans of text, with whether the model accepted them as drafts.
// Text is only ever set as textContent, so that no answer can become markup.

const element = (id) => document.getElementById(id);
const STORE = "dsv3_jax.spans";

let model = "";
let messages = JSON.parse(sessionStorage.getItem(STORE) || "[]");
let running = null; // AbortController of the answer that is being streamed

function headers() {
  const key = element("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

function report(text, isError = false) {
  element("status").textContent = text;
  element("status").classList.toggle("error", isError);
}

function show(message) {
  const item = document.createElement("li");
  item.className = message.role;
  const title = document.createElement("h2");
  title.textContent = message.role === "user" ? "You" : "Answer";
  const parts = { reasoning: document.createElement("p"), content: document.createElement("p") };
  parts.reasoning.className = "reasoning";
  parts.reasoning.hidden = true;
  item.append(title, parts.reasoning, parts.content);
  element("log").append(item);
  const add = (span) => {
    const text = document.createElement("span");
    text.textContent = span.text;
    if (span.is_draft) {
      text.className = "draft";
      element("legend").hidden = false;
    }
    parts[span.kind].append(text);
    parts[span.kind].hidden = false;
    element("log").scrollTop = element("log").scrollHeight;
  };
  message.spans.forEach(add);
  return add;
}

function content(message) {
  return message.spans.filter((span) => span.kind === "content").map((span) => span.text).join("");
}

// Adds a span to a message, joined with the one before it if they are alike.
function append(message, span) {
  const last = message.spans[message.spans.length - 1];
  if (last && last.kind === span.kind && last.is_draft === span.is_draft) last.text += span.text;
  else message.spans.push({ ...span });
}

function save() {
  sessionStorage.setItem(STORE, JSON.stringify(messages));
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function body() {
  const system = element("system").value;
  const history = messages.map((message) => ({ role: message.role, content: content(message) }));
  const fields = { model, messages: history, stream: true };
  if (system) history.unshift({ role: "system", content: system });
  for (const name of ["temperature", "top_p", "max_tokens"]) {
    if (element(name).value !== "") fields[name] = Number(element(name).value);
  }
  return JSON.stringify(fields);
}

async function answer() {
  const controller = (running = new AbortController());
  element("stop").disabled = false;
  element("send").disabled = true;
  report("Answering");
  element("log").setAttribute("aria-busy", "true"); // an answer is read out when it is complete
  const message = { role: "assistant", spans: [] };
  let add = null;
  try {
    if (!model) await readModel();
    const response = await fetch("/chat/spans", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: body(),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    add = show(message);
    let reason = "";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const span of event.spans) {
        append(message, span);
        add(span);
      }
      reason = event.finish_reason || reason;
    }
    report(reason === "length" ? "Ended at the largest number of tokens" : "");
  } catch (error) {
    if (error.name === "AbortError") report("Stopped");
    else report(error.message, true);
  } finally {
    if (running === controller) {
      if (add) messages.push(message);
      save();
      end();
    }
  }
}

function end() {
  running = null;
  element("stop").disabled = true;
  element("send").disabled = false;
  element("log").setAttribute("aria-busy", "false");
}

function send(event) {
  event.preventDefault();
  const text = element("message").value;
  if (!text.trim() || running) return;
  element("message").value = "";
  const message = { role: "user", spans: [{ kind: "content", text, is_draft: false }] };
  // A message without an answer, after an error, is replaced by the next one.
  if (messages.length && messages[messages.length - 1].role === "user") {
    messages.pop();
    element("log").lastElementChild.remove();
  }
  messages.push(message);
  save();
  show(message);
  answer();
}

async function readModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  const content = await response.json();
  if (!response.ok) throw new Error(content.error.message);
  model = content.data[0].id;
  element("model").textContent = model;
}

let previous = null;

async function readFigures() {
  if (document.hidden) return;
  try {
    const text = await (await fetch("/metrics")).text();
    const figure = (name) => {
      const line = new RegExp(`^vllm:${name}\\{[^\\n]*\\} (\\S+)$`, "m").exec(text);
      return line ? Number(line[1]) : 0;
    };
    const now = { time: performance.now(), tokens: figure("generation_tokens_total") };
    element("running").textContent = figure("num_requests_running");
    element("waiting").textContent = figure("num_requests_waiting");
    element("cache").textContent = `${Math.round(100 * figure("kv_cache_usage_perc"))} %`;
    const asked = figure("prefix_cache_queries_total");
    const share = asked ? figure("prefix_cache_hits_total") / asked : 0;
    element("hits").textContent = `${Math.round(100 * share)} %`;
    const drafted = figure("spec_decode_num_draft_tokens_total");
    const accepted = figure("spec_decode_num_accepted_tokens_total") / drafted;
    element("accepted").textContent = drafted ? `${Math.round(100 * accepted)} %` : "–";
    if (previous) {
      const rate = (1000 * (now.tokens - previous.tokens)) / (now.time - previous.time);
      element("rate").textContent = Math.round(rate);
    }
    previous = now;
  } catch {
    for (const id of ["running", "waiting", "cache", "hits", "accepted", "rate"]) {
      element(id).textContent = "–";
    }
    previous = null;
  }
}

element("form").addEventListener("submit", send);
element("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
element("stop").addEventListener("click", () => running?.abort());
element("clear").addEventListener("click", () => {
  running?.abort();
  end();
  messages = [];
  element("legend").hidden = true;
  save();
  element("log").replaceChildren();
  report("");
  element("message").focus();
});

messages.forEach((message) => show(message));
readModel().catch((error) => report(error.message, true));
readFigures();
setInterval(readFigures, 1000);
