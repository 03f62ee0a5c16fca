// The chat: a conversation kept for this tab, answers streamed, and figures read once a second.
// Answers come as spans of text, with whether the model accepted them as drafts.

import { make, render, shaded } from "/page/markdown.js";

const element = (id) => document.getElementById(id);
const STORE = "dsv3_jax.spans";
const VIEW = "dsv3_jax.view";
const DEMO = "demo"; // the model that comes with the package writes Python, without Markdown

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

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Without https, browsers have a clipboard for selected text only.
    const area = make("textarea", { value: text, className: "clipboard" });
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) return report("This browser does not let the page copy", true);
  }
  report("Copied");
}

function action(name, run) {
  const button = make("button", { type: "button", textContent: name });
  button.addEventListener("click", run);
  return button;
}

// Shows a message, and returns how to bring it up to date when it has grown.
function show(message) {
  const isAnswer = message.role === "assistant";
  const reasoning = make("p", { className: "reasoning" });
  const text = make("div", { className: "text" });
  const item = make("li", { className: message.role });
  item.append(make("h2", { textContent: isAnswer ? "Answer" : "You" }), reasoning, text);
  if (isAnswer) {
    const buttons = [action("Copy", () => copy(content(message))), action("Regenerate", regenerate)];
    buttons[1].className = "regenerate"; // only the last answer has it, see style.css
    item.append(make("div", { className: "actions" }, ...buttons));
  }
  element("log").append(item);
  let timer = null;
  let cost = 0; // milliseconds that the last rendering took
  const update = () => {
    timer = null;
    const log = element("log");
    const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    const begin = performance.now();
    const source = content(message);
    const [thought, drafts] = [ranges(message, "reasoning"), ranges(message, "content")];
    reasoning.replaceChildren(...shaded(thought.text, 0, thought.drafts));
    reasoning.hidden = !thought.text;
    const asMarkdown = isAnswer && element("view").value === "markdown";
    text.classList.toggle("source", !asMarkdown);
    if (asMarkdown) text.replaceChildren(render(source, drafts.drafts));
    else text.replaceChildren(...shaded(source, 0, drafts.drafts));
    if (message.spans.some((span) => span.is_draft)) element("legend").hidden = false;
    if (isAtEnd) log.scrollTop = log.scrollHeight;
    cost = performance.now() - begin;
  };
  item.update = update;
  update();
  // A long answer is rendered less often, so that the page spends a tenth of its time on it.
  return () => (timer ??= setTimeout(update, Math.max(40, 9 * cost)));
}

function showAll() {
  element("log").replaceChildren();
  element("legend").hidden = true;
  messages.forEach(show);
  element("log").scrollTop = element("log").scrollHeight;
}

// Returns the text of one kind, and the ranges of it that were drafted.
function ranges(message, kind) {
  const drafts = [];
  let text = "";
  for (const span of message.spans) {
    if (span.kind !== kind) continue;
    if (span.is_draft) drafts.push([text.length, text.length + span.text.length]);
    text += span.text;
  }
  return { text, drafts };
}

function content(message) {
  return ranges(message, "content").text;
}

// Adds a span to a message, joined with the one before it if they are alike.
function append(message, span) {
  const last = message.spans[message.spans.length - 1];
  if (last && last.kind === span.kind && last.is_draft === span.is_draft) last.text += span.text;
  else message.spans.push({ ...span });
}

function save() {
  try {
    sessionStorage.setItem(STORE, JSON.stringify(messages));
  } catch {
    sessionStorage.removeItem(STORE);
    report("The conversation is too long for this browser to keep it over a reload", true);
  }
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
  let grown = null;
  try {
    if (!model) await readModel();
    const response = await fetch("/chat/spans", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: body(),
      signal: controller.signal,
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    grown = show(message);
    let reason = "";
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const span of event.spans) append(message, span);
      if (event.spans.length) grown();
      reason = event.finish_reason || reason;
    }
    report(reason === "length" ? "Stopped at the maximum number of tokens" : "");
  } catch (error) {
    if (error.name === "AbortError") report("Stopped");
    else report(error.message, true);
  } finally {
    if (running === controller) {
      if (grown) {
        messages.push(message);
        element("log").lastElementChild.update();
      } else if (!element("message").value) {
        // A message that got no answer can be sent again.
        element("message").value = content(messages[messages.length - 1]);
      }
      save();
      end();
    }
  }
}

// Asks again for the last answer.
function regenerate() {
  if (running || messages[messages.length - 1]?.role !== "assistant") return;
  messages.pop();
  element("log").lastElementChild.remove();
  save();
  answer();
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

// Returns the view that the user selected, or else that of the tab's model.
function preferredView() {
  return localStorage.getItem(VIEW) ?? sessionStorage.getItem(VIEW) ?? "markdown";
}

async function readModel() {
  const response = await fetch("/v1/models", { headers: headers() });
  const content = await response.json();
  if (!response.ok) throw new Error(content.error.message);
  model = content.data[0].id;
  element("model").textContent = model;
  sessionStorage.setItem(VIEW, model === DEMO ? "source" : "markdown"); // for a reload
  if (preferredView() !== element("view").value) {
    element("view").value = preferredView();
    if (!running) showAll();
  }
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
element("log").addEventListener("copytext", (event) => copy(event.detail));
element("view").addEventListener("change", () => {
  localStorage.setItem(VIEW, element("view").value);
  for (const item of element("log").children) item.update();
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

element("view").value = preferredView(); // a reload does not wait for the model's name
showAll();
readModel().catch((error) => report(error.message, true));
readFigures();
setInterval(readFigures, 1000);
