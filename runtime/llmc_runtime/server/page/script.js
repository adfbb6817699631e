// The page at /: a chat over this server's own API, and its figures. What a model or a user says is set as textContent,
// never as markup; the key is in its field alone.
const $ = (id) => document.getElementById(id);
const EVERY = 1000; // milliseconds between two looks at the figures
const KEPT = 60; // points of a sparkline
const needsKey = document.body.dataset.key === "needed";

let talk = []; // the conversation, as the API has it
let underWay = null; // AbortController of the answer that is being written
let model = null;

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function made(parent, tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value.trim()}`;
  const reply = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw new Refused(reply.status, body.error?.message ?? `the server answered ${reply.status}`);
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
    }
  }
}

// ---- the conversation

function shown(role, text = "") {
  const message = made($("messages"), "article", `message ${role}`);
  made(message, "div", "who", role === "user" ? "You" : "Model");
  return { message, text: made(message, "div", "text", text), reasoning: null };
}

function reason(answer, text) {
  if (!answer.reasoning) {
    const folded = document.createElement("details");
    made(folded, "summary", "", "Reasoning");
    answer.text.before(folded);
    answer.reasoning = made(folded, "div", "text");
  }
  answer.reasoning.textContent += text;
}

function follow(work) {
  const list = $("messages");
  const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
  work();
  if (atEnd) list.scrollTop = list.scrollHeight;
}

function request() {
  const system = $("system").value.trim();
  const request = { messages: system ? [{ role: "system", content: system }, ...talk] : talk };
  if (model) request.model = model;
  if ($("temperature").value !== "") request.temperature = Number($("temperature").value);
  if ($("most").value !== "") request.max_tokens = Number($("most").value);
  return { ...request, stream: true, stream_options: { include_usage: true } };
}

async function write(answer, signal) {
  const began = performance.now();
  let first = null, usage = null, end = null;
  const reply = await ask("v1/chat/completions", { method: "POST", body: JSON.stringify(request()), signal });
  for await (const event of events(reply)) {
    if (event.error) throw new Refused(0, event.error.message);
    usage = event.usage ?? usage;
    const [choice] = event.choices;
    if (!choice) continue;
    end = choice.finish_reason ?? end;
    const thought = choice.delta.reasoning_content ?? choice.delta.reasoning;
    if (thought || choice.delta.content) first ??= performance.now();
    follow(() => {
      if (thought) reason(answer, thought);
      answer.text.textContent += choice.delta.content ?? "";
    });
  }
  if (!usage || first === null) return "no text";
  const seconds = ((performance.now() - began) / 1000).toFixed(2);
  const cut = end === "length" ? ", cut off there" : "";
  return `${usage.completion_tokens} tokens in ${seconds} s, the first after ${(first - began).toFixed(0)} ms${cut}`;
}

function problem(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

async function send() {
  const text = $("prompt").value.trim();
  if (!text || underWay) return;
  problem("");
  underWay = new AbortController();
  const question = shown("user", text), answer = shown("assistant"), mine = talk;
  mine.push({ role: "user", content: text });
  $("prompt").value = "";
  $("messages").scrollTop = $("messages").scrollHeight;
  busy(answer, true);
  let note = "stopped";
  try {
    note = await write(answer, underWay.signal);
  } catch (error) {
    if (error.name !== "AbortError") {
      problem(error.message);
      note = "ended by an error";
    }
  }
  busy(answer, false);
  underWay = null;
  if (note.startsWith("ended") && !answer.text.textContent) return takeBack(mine, question, answer, text);
  mine.push({ role: "assistant", content: answer.text.textContent });
  follow(() => made(answer.message, "div", "note", note));
}

function takeBack(talked, question, answer, text) {
  talked.pop();
  question.message.remove();
  answer.message.remove();
  $("prompt").value = text;
}

function busy(answer, yes) {
  answer.message.classList.toggle("under-way", yes);
  $("messages").setAttribute("aria-busy", yes);
  $("send").disabled = yes;
  $("stop").disabled = !yes;
  if (!yes) $("prompt").focus();
}

function stop() {
  underWay?.abort();
}

function fresh() {
  stop();
  talk = [];
  $("messages").replaceChildren();
  problem("");
  $("prompt").focus();
}

// ---- the figures

const rate = (name) => (now, before, seconds) => (now[name] - before[name]) / seconds;
const FIGURES = [
  ["Tokens a second", rate("generation_tokens_total"), (x) => x.toFixed(0)],
  ["Running", (now) => now.num_requests_running, (x) => x.toFixed(0)],
  ["Waiting", (now) => now.num_requests_waiting, (x) => x.toFixed(0)],
  ["KV cache in use", (now) => 100 * now.kv_cache_usage_perc, (x) => `${x.toFixed(1)} %`],
  ["Time to first token", (now, before) => {
    const count = now.time_to_first_token_seconds_count - before.time_to_first_token_seconds_count;
    return count ? 1000 * (now.time_to_first_token_seconds_sum - before.time_to_first_token_seconds_sum) / count : null;
  }, (x) => `${x.toFixed(0)} ms`],
].map(([name, of, spelled]) => ({ name, of, spelled, points: [], ...sparkline(name) }));

function sparkline(name) {
  const figure = made($("figures"), "div", "figure");
  made(figure, "dt", "", name);
  const value = made(figure, "dd", "value", "–");
  const drawing = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  drawing.setAttribute("viewBox", `0 0 ${KEPT - 1} 20`);
  drawing.setAttribute("preserveAspectRatio", "none");
  drawing.setAttribute("aria-hidden", "true");
  const [area, line] = ["polygon", "polyline"].map((shape) => {
    const part = document.createElementNS("http://www.w3.org/2000/svg", shape);
    drawing.append(part);
    return part;
  });
  made(figure, "dd", "drawing").append(drawing);
  return { value, area, line };
}

function draw(figure, point) {
  figure.points.push(point ?? figure.points.at(-1) ?? null);
  figure.points.splice(0, figure.points.length - KEPT);
  const last = figure.points.at(-1);
  if (last === null) return;
  figure.value.textContent = figure.spelled(last);
  const top = Math.max(...figure.points, 1e-9), begin = KEPT - figure.points.length;
  const line = figure.points.map((y, i) => `${begin + i},${(19 - 18 * (y ?? 0) / top).toFixed(2)}`);
  figure.line.setAttribute("points", line.join(" "));
  figure.area.setAttribute("points", `${begin},20 ${line.join(" ")} ${KEPT - 1},20`);
}

function read(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^llmc:(\w+)(?:\{.*\})? (\S+)$/.exec(line);
    if (match) found[match[1]] = (found[match[1]] ?? 0) + Number(match[2]);
  }
  return found;
}

function state(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

let before = null, beforeAt = 0, refused = null; // refused: the key that the server did not take

async function look() {
  const key = $("key").value;
  if (document.hidden || key === refused) return;
  if (needsKey && !key) return state("needs an API key", "");
  try {
    const now = read(await (await ask("metrics")).text()), at = performance.now();
    if (before) for (const figure of FIGURES) draw(figure, figure.of(now, before, (at - beforeAt) / 1000));
    [before, beforeAt] = [now, at];
    if (!model) {
      const { data: [served] } = await (await ask("v1/models")).json();
      model = served.id;
      $("model").textContent = `${served.id}, ${served.max_model_len} tokens`;
      document.title = `${served.id} – llmc`;
    }
    state("connected", "good");
  } catch (error) {
    before = null;
    if (error.status === 401) refused = key;
    state(error.status === 401 ? "the API key is not valid" : "the server does not answer", "bad");
  }
}

async function looking() {
  await look();
  setTimeout(looking, EVERY);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
$("key").addEventListener("change", look);
$("stop").addEventListener("click", stop);
$("fresh").addEventListener("click", fresh);
$(needsKey ? "key" : "prompt").focus();
looking();
