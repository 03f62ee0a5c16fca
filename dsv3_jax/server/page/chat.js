// The chat: a conversation kept for this tab, answers streamed, and figures read once a second.
// Text is only ever set as textContent, so that no answer can become markup.

const element = (id) => document.getElementById(id);
const STORE = "dsv3_jax.messages";

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
  const reasoning = document.createElement("p");
  reasoning.className = "reasoning";
  const content = document.createElement("p");
  item.append(title, reasoning, content);
  element("log").append(item);
  const update = () => {
    reasoning.textContent = message.reasoning || "";
    reasoning.hidden = !message.reasoning;
    content.textContent = message.content;
    element("log").scrollTop = element("log").scrollHeight;
  };
  update();
  return update;
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
  const history = messages.map(({ role, content }) => ({ role, content }));
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
  const message = { role: "assistant", content: "", reasoning: "" };
  let update = null;
  try {
    if (!model) await readModel();
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: body(),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    update = show(message);
    let reason = "";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        message.content += choice.delta.content || "";
        message.reasoning += choice.delta.reasoning_content || "";
        reason = choice.finish_reason || reason;
      }
      update();
    }
    report(reason === "length" ? "Ended at the largest number of tokens" : "");
  } catch (error) {
    if (error.name === "AbortError") report("Stopped");
    else report(error.message, true);
  } finally {
    if (running === controller) {
      if (update) messages.push(message);
      save();
      running = null;
      element("stop").disabled = true;
      element("send").disabled = false;
    }
  }
}

function send(event) {
  event.preventDefault();
  const text = element("message").value;
  if (!text.trim() || running) return;
  element("message").value = "";
  const message = { role: "user", content: text };
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
    if (previous) {
      const rate = (1000 * (now.tokens - previous.tokens)) / (now.time - previous.time);
      element("rate").textContent = Math.round(rate);
    }
    previous = now;
  } catch {
    for (const id of ["running", "waiting", "cache", "hits", "rate"]) {
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
  running = null;
  element("stop").disabled = true;
  element("send").disabled = false;
  messages = [];
  save();
  element("log").replaceChildren();
  report("");
  element("message").focus();
});

messages.forEach((message) => show(message));
readModel().catch((error) => report(error.message, true));
readFigures();
setInterval(readFigures, 1000);
