"use strict";
// Draws the samples that #data holds, by prompt, in order of steps. Filters are in the address (#kind=heldout&text=...), so that a view can be shared.
const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("filters"), place = document.getElementById("prompts"), more = document.getElementById("more");
const PAGE = 30, TONES = 5;
let shown = PAGE;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function read() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) if (form.elements[name]) form.elements[name].value = value;
}

function within(value, low, high) {
  return (low === "" || value >= Number(low)) && (high === "" || value <= Number(high));
}

function wanted(sample, asked) {
  return (!asked.kind || sample.kind === asked.kind) && within(sample.step, asked.from, asked.to) && within(sample.reward, asked.least, asked.most)
    && (!asked.text || (sample.prompt + "\n" + sample.pieces.join("")).toLowerCase().includes(asked.text.toLowerCase()));
}

function tint(span, sample, index, colour) {
  const weight = sample.weights[index], version = sample.versions[index];
  span.title = "version " + version + (weight == null ? "" : ", weight " + weight);
  if (colour === "version") {
    const order = [...new Set(sample.versions)].sort((a, b) => b - a).indexOf(version);
    if (order) span.className = "v" + (1 + (order - 1) % (TONES - 1));
  } else if (colour === "weight" && weight != null && weight !== 1) {
    const far = Math.min(1, Math.abs(Math.log(Math.max(weight, 0.01))) / Math.log(4));
    span.style.background = "rgb(var(--" + (weight > 1 ? "up" : "down") + ") / " + (far * 0.6).toFixed(2) + ")";
  }
}

function card(sample, colour) {
  const made = element("div", "sample " + (sample.score >= 1 ? "right" : sample.score <= 0 ? "wrong" : ""));
  const age = sample.kind === "train" ? ", age " + sample.age : "";
  made.append(element("p", "what", (sample.kind === "train" ? "trained on in step " : "held out, version ") + sample.step + ": reward "
    + Number(sample.reward.toFixed(3)) + ", " + sample.num_tokens + " tokens" + age));
  const text = made.appendChild(element("pre"));
  sample.pieces.forEach((piece, index) => {
    const span = element("span", "", piece);
    if (sample.pieces.length === sample.versions.length) tint(span, sample, index, colour);
    text.append(span);
  });
  return made;
}

function draw() {
  const asked = Object.fromEntries(new FormData(form));
  const groups = new Map();
  const found = data.samples.filter(sample => wanted(sample, asked));
  for (const sample of found) {
    const key = sample.kind + "\n" + sample.prompt_id;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(sample);
  }
  place.replaceChildren();
  for (const samples of [...groups.values()].slice(0, shown)) {
    const article = place.appendChild(element("article"));
    article.append(element("p", "what", "prompt " + samples[0].prompt_id + (samples[0].reference ? ", reference " + samples[0].reference : "")));
    article.append(element("pre", "prompt", samples[0].prompt));
    const row = article.appendChild(element("div", "row"));
    for (const sample of samples) row.append(card(sample, asked.colour));
  }
  document.getElementById("count").textContent = found.length + " of " + data.samples.length + " samples here, of " + groups.size
    + " prompts; kept are steps " + data.first + " to " + data.last;
  more.hidden = groups.size <= shown;
}

form.addEventListener("submit", event => event.preventDefault());
form.addEventListener("input", () => {
  const asked = [...new FormData(form)].filter(([, value]) => value !== "");
  history.replaceState(null, "", "#" + new URLSearchParams(asked));
  shown = PAGE;
  draw();
});
more.addEventListener("click", () => { shown += PAGE; draw(); });
window.addEventListener("hashchange", () => { read(); draw(); });
document.getElementById("name").textContent = "Rollouts of " + data.name;
document.title = "Rollouts of " + data.name;
read();
draw();
