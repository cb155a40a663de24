// What the admin pages do beyond forms and links: moments in the reader's zone, copying, charts,
// uploads in parts with progress, and streaming in the playground. Every page works without it,
// except where it says so. It knows the pages' data attributes and refuses to know the API's keys.

import uPlot from "/static/vendor/uplot/uPlot.esm.js";

const PART_BYTES = 4 * 1024 * 1024;
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Moments -----------------------------------------------------------------------------------------

const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const minute = new Intl.DateTimeFormat(undefined, { timeStyle: "short" });
const utcDay = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short", timeZone: "UTC" });

function localTimes(root) {
  for (const time of all("time[datetime]:not([data-countdown], [data-day])", root)) {
    const moment = new Date(time.dateTime);
    time.textContent = ("precise" in time.dataset ? clock : day).format(moment);
    time.title = moment.toISOString();
  }
}

function countdowns() {
  for (const time of all("time[data-countdown]")) {
    const seconds = Math.round((new Date(time.dateTime) - Date.now()) / 1000);
    time.textContent = seconds > 0 ? `ends in ${span(seconds)}` : "ended";
  }
}

function span(seconds) {
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const first = parts.findIndex(([size]) => seconds >= size);
  return parts
    .slice(first, first + 2)
    .map(([size, unit]) => {
      const count = Math.floor(seconds / size);
      seconds -= count * size;
      return `${count} ${unit}`;
    })
    .join(" ");
}

// Charts are drawn from the tables beside them ------------------------------------------------------

const charts = new Map();

function drawCharts(root) {
  for (const [box, chart] of charts) {
    if (!box.isConnected) {
      chart.destroy();
      charts.delete(box);
    }
  }
  for (const box of all("[data-chart]", root)) drawChart(box);
}

function drawChart(box) {
  const table = document.getElementById(box.dataset.chart);
  const rows = all("tbody tr", table).filter((row) => row.querySelector("time")).reverse();
  const names = all("thead th", table).slice(1).map((cell) => cell.textContent);
  const numbers = rows.map((row) => all("td", row).slice(1).map((cell) => number(cell)));
  const data = [
    rows.map((row) => new Date(row.querySelector("time").dateTime) / 1000),
    ...names.map((_, i) => numbers.map((values) => values[i])),
  ];
  charts.get(box)?.destroy();
  const made = "days" in box.dataset ? dayOptions(box, names) : options(box, names);
  charts.set(box, new uPlot(made, data, box));
}

function number(cell) {
  const value = Number(cell.textContent.replaceAll(",", ""));
  return Number.isNaN(value) ? null : value;
}

function options(box, names) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => resolved(style.getPropertyValue(name));
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width: box.clientWidth,
    height: box.clientHeight - (names.length > 1 ? 28 : 0),
    legend: { show: names.length > 1, live: false },
    cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(1, high * 1.1)] } },
    axes: [{ ...axis, size: 30, space: 84, values: named((step) => (step < 60 ? clock : minute)) }, { ...axis, size: 56 }],
    series: [{}, ...names.map((label, i) => series(label, colour(`--series-${(i % 4) + 1}`)))],
  };
}

// A value between two gaps is a point: a line has nothing to go to.
function series(label, stroke) {
  const alone = (plot, i) => {
    const values = plot.data[i];
    return [...values.keys()].filter((at) => values[at] !== null && (values[at - 1] ?? values[at + 1] ?? null) === null);
  };
  return { label, stroke, width: 2, points: { show: true, filter: alone, size: 5, fill: stroke } };
}

const named = (formatOf) => (_, ticks, axis, space, step) => ticks.map((tick) => formatOf(step).format(tick * 1000));

function dayOptions(box, names) {
  const made = options(box, names);
  const day = 86400;
  made.tzDate = (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC");
  made.scales.x = { range: (_, low, high) => [low - 0.6 * day, high + 0.6 * day] };
  made.axes[0] = { ...made.axes[0], incrs: [1, 2, 7, 14, 28, 91].map((days) => days * day), values: named(() => utcDay) };
  made.series[1] = { ...made.series[1], fill: made.series[1].stroke, width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.7, 48] }) };
  return made;
}

function resolved(value) {
  const probe = document.createElement("span");
  probe.style.color = value;
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

// Small things ----------------------------------------------------------------------------------------

function prepare(root) {
  localTimes(root);
  for (const button of all("[data-copy], [data-copy-from]", root)) button.hidden = !navigator.clipboard;
  for (const part of all("[data-needs-script]", root)) part.hidden = false;
  for (const part of all("[data-needless]", root)) part.hidden = true;
  drawCharts(root);
}

// A part that is polled is no live region: it would be read out whole each time.
function say(words, root = document) {
  const place = root.querySelector("[data-said]");
  if (place && words && place.textContent !== words) place.textContent = words;
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy], [data-copy-from]");
  if (!button) return;
  const from = button.dataset.copyFrom;
  await navigator.clipboard.writeText(from ? document.getElementById(from).textContent : button.dataset.copy);
  if (button.dataset.copied) return;
  const label = [...button.childNodes];
  button.dataset.copied = true;
  button.textContent = "Copied";
  setTimeout(() => {
    button.replaceChildren(...label);
    delete button.dataset.copied;
  }, 1500);
});

document.addEventListener("submit", (event) => {
  const words = event.submitter?.dataset.confirm;
  if (words && !confirm(words)) event.preventDefault();
}, true);

document.addEventListener("change", (event) => {
  if ("submit" in event.target.dataset) event.target.form.requestSubmit();
});

document.addEventListener("input", (event) => {
  if (!("output" in event.target.dataset)) return;
  const output = document.querySelector(`output[for="${CSS.escape(event.target.id)}"]`);
  if (output) output.textContent = event.target.value;
});

const open = new Set();
document.addEventListener("htmx:beforeSwap", () => {
  open.clear();
  for (const each of all("details[data-keep-open][open]")) open.add(each.id);
});
document.addEventListener("htmx:afterSwap", (event) => {
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  prepare(event.target.isConnected ? event.target : document);
  say(event.target.querySelector("[data-say]")?.dataset.say);
});

// Uploads in parts ------------------------------------------------------------------------------------

const KINDS = [["adapter_config", /(^|\/)adapter_config\.json$/], ["adapter_model", /(^|\/)adapter_model\.safetensors$/], ["archive", /\.zip$/]];

async function send(url, options) {
  const response = await fetch(url, options);
  if (response.ok) return response.status === 204 ? {} : response.json();
  const body = await response.json().catch(() => null);
  const error = new Error(body?.error?.message ?? `The server answered ${response.status}.`);
  error.offset = response.headers.get("upload-offset");
  error.param = body?.error?.param;
  throw error;
}

const json = (body) => ({ method: "POST", headers: { accept: "application/json", "content-type": "application/json" }, body: JSON.stringify(body) });

async function upload(form) {
  const files = KINDS.map(([part]) => [part, form.elements[part].files[0]]).filter(([, file]) => file);
  if (!["adapter_config,adapter_model", "archive"].includes(String(files.map(([part]) => part)))) {
    throw new Error("Choose adapter_config.json and adapter_model.safetensors, or one .zip of both.");
  }
  const fields = Object.fromEntries(["name", "alias"].map((id) => [id, document.getElementById(id).value.trim()]).filter(([, value]) => value));
  const sizes = Object.fromEntries(files.map(([part, file]) => [part, file.size]));
  const total = files.reduce((sum, [, file]) => sum + file.size, 0);
  const job = await send(form.dataset.upload, json({ ...fields, sizes }));
  let sent = 0;
  for (const [part, file] of files) {
    await sendFile(`${job.parts}/${part}`, file, (done) => progress(form, sent + done, total));
    sent += file.size;
  }
  await send(job.finish, { method: "POST", headers: { accept: "application/json" } });
  location.assign(job.page);
}

async function sendFile(url, file, told) {
  let failures = 0;
  for (let offset = 0; offset < file.size;) {
    const body = file.slice(offset, offset + PART_BYTES);
    try {
      await send(url, { method: "PUT", headers: { accept: "application/json", "upload-offset": offset, "content-type": "application/octet-stream" }, body });
      offset += body.size;
      failures = 0;
    } catch (error) {
      if (error.offset !== null && error.offset !== undefined) offset = Number(error.offset);
      else if (error instanceof TypeError && ++failures < 5) await new Promise((go) => setTimeout(go, 500 * 2 ** failures));
      else throw error;
    }
    told(offset);
  }
}

function progress(form, sent, total) {
  const bar = form.querySelector("progress");
  bar.value = total ? sent / total : 1;
  form.querySelector("[data-progress-label]").textContent = `Uploading: ${Math.round(bar.value * 100)} %`;
  say(`Uploading: ${Math.floor(bar.value * 10) * 10} %`, form);
}

function complain(form, error) {
  let notice = form.querySelector(".notice");
  if (!notice) {
    notice = document.createElement("div");
    notice.id = "complaint";
    notice.className = "notice bad";
    notice.tabIndex = -1;
    notice.setAttribute("role", "alert");
    form.prepend(notice);
  }
  notice.replaceChildren(Object.assign(document.createElement("p"), { textContent: error.message }));
  const field = form.elements.namedItem(error.param ?? "");
  field?.setAttribute("aria-invalid", "true");
  field?.setAttribute("aria-errormessage", "complaint");
  (field ?? notice).focus();
}

function forgive(form) {
  form.querySelector(".notice")?.remove();
  for (const field of all("[aria-invalid]", form)) field.removeAttribute("aria-invalid");
}

for (const form of all("form[data-upload]")) {
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button.main");
    button.disabled = true;
    forgive(form);
    form.querySelector("[data-progress]").hidden = false;
    try {
      await upload(form);
    } catch (error) {
      form.querySelector("[data-progress]").hidden = true;
      button.disabled = false;
      complain(form, error);
    }
  });
  const drop = form.querySelector("[data-drop]");
  for (const kind of ["dragenter", "dragover"]) drop.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
  for (const kind of ["dragleave", "drop"]) drop.addEventListener(kind, () => drop.classList.remove("over"));
  drop.addEventListener("drop", async (event) => {
    event.preventDefault();
    const { items, files } = event.dataTransfer; // both are empty after the first await
    const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
    const dropped = [...files];
    try {
      choose(form, entries.length ? (await Promise.all(entries.map(filesOf))).flat() : dropped);
      const named = entries.find((entry) => entry.isDirectory) ?? dropped.find((file) => /\.zip$/i.test(file.name));
      if (named) nameAfter(form, named);
    } catch (error) {
      complain(form, error);
    }
  });
}

function nameAfter(form, file) {
  const field = form.elements.name;
  const name = file.name.replace(/\.zip$/i, "").toLowerCase().replaceAll(/[^a-z0-9._-]+/g, "-").replaceAll(/^[^a-z0-9]+|[^a-z0-9]+$/g, "");
  if (!field.value) field.value = name.slice(0, field.maxLength);
}

async function filesOf(entry) {
  if (entry.isFile) return [await new Promise((...told) => entry.file(...told))];
  const reader = entry.createReader();
  const found = [];
  for (let some = null; some?.length !== 0;) { // a folder tells its entries in portions
    some = await new Promise((...told) => reader.readEntries(...told));
    found.push(...some.filter((each) => each.isFile));
  }
  return (await Promise.all(found.map(filesOf))).flat();
}

function choose(form, files) {
  const chosen = Object.fromEntries(KINDS.map(([part, pattern]) => [part, files.find((each) => pattern.test(each.name))]));
  if (chosen.adapter_config || chosen.adapter_model) delete chosen.archive; // a folder may hold a zip besides
  else if (!chosen.archive) throw new Error("None of that is an adapter: drop adapter_config.json and adapter_model.safetensors, the folder that holds them, or a .zip of it.");
  for (const [part] of KINDS) {
    if ((part === "archive") !== Boolean(chosen.archive)) form.elements[part].value = "";
    if (!chosen[part]) continue;
    const list = new DataTransfer();
    list.items.add(chosen[part]);
    form.elements[part].files = list.files;
  }
  forgive(form);
}

// The playground --------------------------------------------------------------------------------------

for (const form of all("form[data-playground]")) {
  let running = null;
  const stop = form.querySelector("[data-stop]");
  stop.addEventListener("click", () => running?.abort());
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    running?.abort();
    running = new AbortController();
    stop.hidden = false;
    const more = form.elements.more.value.split(",").map((name) => name.trim()).filter(Boolean);
    const models = [...new Set([...all("input[name=model]:checked", form).map((box) => box.value), ...more])];
    const answers = document.querySelector("[data-answers]");
    answers.replaceChildren();
    const { signal } = running;
    await Promise.all(models.map((model) => ask(form, model, card(answers, model), signal)));
    if (running.signal === signal) {
      running = null;
      if (document.activeElement === stop) form.querySelector("button.main").focus();
      stop.hidden = true;
    }
  });
}

function card(answers, model) {
  const made = document.querySelector("template[data-answer]").content.cloneNode(true);
  made.querySelector("[data-model]").textContent = model;
  answers.append(made);
  return answers.lastElementChild;
}

async function ask(form, model, box, signal) {
  const text = box.querySelector("[data-text]");
  const facts = box.querySelector("[data-facts]");
  const began = performance.now();
  let first = null;
  let usage = null;
  try {
    for await (const chunk of stream(form, model, signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage ?? usage;
      const piece = chunk.choices?.[0]?.delta?.content;
      if (!piece) continue;
      first ??= performance.now() - began;
      text.append(piece);
    }
    facts.textContent = told(performance.now() - began, first, usage);
  } catch (error) {
    text.parentElement.hidden = !text.textContent;
    facts.className = error.name === "AbortError" ? "quiet" : "wrong";
    facts.textContent = error.name === "AbortError" ? "stopped" : error.message;
  }
}

function told(total, first, usage) {
  const tokens = usage?.completion_tokens ?? 0;
  const rate = first !== null && tokens > 1 ? `, ${((tokens - 1) / ((total - first) / 1000)).toFixed(1)} tokens/s` : "";
  const cached = usage?.prompt_tokens_details?.cached_tokens ? ` (${usage.prompt_tokens_details.cached_tokens} cached)` : "";
  return `${usage?.prompt_tokens ?? 0} prompt tokens${cached}, ${tokens} generated, first after ${Math.round(first ?? total)} ms${rate}`;
}

async function* stream(form, model, signal) {
  const value = (name) => form.elements[name].value;
  const body = { model, prompt: value("prompt"), system: value("system"), max_tokens: Number(value("max_tokens")), temperature: Number(value("temperature")) };
  const response = await fetch(form.dataset.playground, { ...json(body), signal });
  if (!response.ok) {
    yield (await response.json().catch(() => ({ error: { message: `The server answered ${response.status}.` } })));
    return;
  }
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const events = (rest + decoder.decode(read.value, { stream: true })).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// The page --------------------------------------------------------------------------------------------

prepare(document);
countdowns();
setInterval(countdowns, 1000);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawCharts(document));
addEventListener("resize", () => drawCharts(document));
document.querySelector("[data-notice]")?.focus({ preventScroll: true });
const tab = document.querySelector("nav [aria-current=page]");
tab?.closest("ul").scrollTo({ left: tab.offsetLeft - 40 });
