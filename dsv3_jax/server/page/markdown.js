// Renders Markdown as elements, with the drafted parts of the text shaded.
// markdown-it parses, and this file makes the elements. Text only ever becomes text nodes, and only
// the elements named here are made, so that no answer can become other markup or load anything.

import MarkdownIt from "/page/markdown-it.min.js";

const parser = new MarkdownIt({ html: false, maxNesting: 20 }).disable("image");

const TAGS = new Set([
  "a", "blockquote", "br", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "s",
  "strong", "table", "tbody", "td", "th", "thead", "tr", "ul",
]);
const LINKS = /^(https?|mailto):/i;
const MARKUP = 64; // the most characters of markup between two pieces of text that are searched

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, attributes);
  element.append(...children);
  return element;
}

// Returns the nodes of `text`, which begins at `start` in the source. `drafts` has the ranges of
// the source that are shaded, in order; a `start` of -1 is unknown, and then nothing is shaded.
export function shaded(text, start, drafts) {
  if (start < 0 || !drafts.length) return [document.createTextNode(text)];
  const nodes = [];
  const end = start + text.length;
  let done = start;
  const add = (to, isDraft) => {
    if (to <= done) return;
    const part = text.slice(done - start, to - start);
    nodes.push(isDraft ? make("span", { className: "draft", textContent: part }) : part);
    done = to;
  };
  let [low, high] = [0, drafts.length]; // the first range that ends after `start`
  while (low < high) {
    const middle = (low + high) >> 1;
    if (drafts[middle][1] > start) high = middle;
    else low = middle + 1;
  }
  for (let i = low; i < drafts.length && drafts[i][0] < end; i++) {
    add(drafts[i][0], false);
    add(Math.min(drafts[i][1], end), true);
  }
  add(end, false);
  return nodes;
}

// Finds pieces of rendered text in the source, in the order in which both have them.
class Place {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.lines = [0];
    for (let i = source.indexOf("\n"); i >= 0; i = source.indexOf("\n", i + 1)) this.lines.push(i + 1);
  }

  // Goes to the first line of a token, unless that is already behind.
  enter(token) {
    if (token.map) this.at = Math.max(this.at, this.lines[token.map[0]] ?? 0);
  }

  // Goes behind the address of a link whose text ended here.
  leaveLink() {
    if (this.source.startsWith("](", this.at)) {
      const end = this.source.indexOf(")", this.at);
      if (end >= 0) this.at = end + 1;
    }
  }

  // Returns where `text` begins, or -1: entities, for example, are not in the source as rendered.
  find(text) {
    const found = this.source.slice(this.at, this.at + text.length + MARKUP).indexOf(text);
    if (found < 0) return -1;
    const start = this.at + found;
    this.at = start + text.length;
    return start;
  }
}

// Returns a block of code, with its language and a button that copies it.
function codeBlock(token, place, drafts) {
  const nodes = token.content
    .split(/(?<=\n)/)
    .flatMap((line) => shaded(line, line.trim() ? place.find(line) : -1, drafts));
  const language = token.info?.trim().split(/\s/)[0] ?? "";
  const button = make("button", { type: "button", className: "copy", textContent: "Copy code" });
  button.addEventListener("click", () =>
    button.dispatchEvent(new CustomEvent("copytext", { bubbles: true, detail: token.content })),
  );
  const head = make("div", { className: "code-head" }, make("span", { textContent: language }), button);
  const pre = make("pre", { tabIndex: 0 }, make("code", {}, ...nodes));
  return make("div", { className: "code" }, head, pre);
}

// Returns an element for a token that opens one, or null for one that is not allowed.
function opened(token) {
  if (!TAGS.has(token.tag)) return null;
  const element = make(token.tag);
  if (token.tag === "a") {
    const address = token.attrGet("href") ?? "";
    if (!LINKS.test(address)) return make("span");
    Object.assign(element, { href: address, target: "_blank", rel: "noopener noreferrer" });
  }
  if (token.tag === "ol" && token.attrGet("start")) element.start = Number(token.attrGet("start"));
  return element;
}

function build(tokens, parent, place, drafts) {
  const parents = [parent];
  for (const token of tokens) {
    const into = parents[parents.length - 1];
    place.enter(token);
    if (token.type === "inline") build(token.children, into, place, drafts);
    else if (token.type === "fence" || token.type === "code_block") {
      into.append(codeBlock(token, place, drafts));
    } else if (token.type === "code_inline") {
      into.append(make("code", {}, ...shaded(token.content, place.find(token.content), drafts)));
    } else if (token.type === "softbreak") into.append("\n");
    else if (token.nesting === 1) {
      // A paragraph of a tight list is hidden: its text is directly in the item.
      const element = token.hidden ? null : opened(token);
      if (element?.tagName === "TABLE") into.append(make("div", { className: "scroll" }, element));
      else if (element) into.append(element);
      parents.push(element ?? into);
    } else if (token.nesting === -1) {
      parents.pop();
      if (token.tag === "a") place.leaveLink();
    } else if (token.tag) into.append(opened(token) ?? "");
    else into.append(...shaded(token.content, place.find(token.content), drafts));
  }
}

// Returns the elements of a Markdown text, in a fragment.
export function render(source, drafts) {
  const fragment = document.createDocumentFragment();
  build(parser.parse(source, {}), fragment, new Place(source), drafts);
  return fragment;
}
