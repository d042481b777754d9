// The demo page: asks the browser what it offers and runs the three measurements.
import init, { Session } from "./kvpack.js";
import { bars, curve, number, percent } from "./plot.js";

const options = new URLSearchParams(location.search);
const notice = document.getElementById("notice");
const sections = Object.fromEntries(["device", "check", "bench", "quality"].map((id) => [id, document.getElementById(id)]));

let session;
let reject; // ends the run that waits for the device
const lost = new Promise((_, refuse) => (reject = refuse));
lost.catch(() => {});

start().catch((error) => say(`This page could not start: ${error.message ?? error}`));

async function start() {
  await init();
  session = await open();
  await run("check", check, () => ({ backend: sections.device.dataset.name, cases: rows.check }));
  await run("bench", bench, () => named(benchRun.report()));
  await run("quality", quality, () => named(qualityRun.report()));
}

/** A report under the name of the device, which the browser tells the page and not the library. */
function named(report) {
  return { ...report, backend: sections.device.dataset.name };
}

// --- the device -----------------------------------------------------------------------------------------------------

async function open() {
  if (options.get("backend") !== "cpu") {
    try {
      const gpu = await Session.gpu(options.get("path") ?? undefined);
      gpu.onLost((reason) => deviceLost(reason));
      describe(gpu.device(), gpu.gpuDevice().adapterInfo);
      return gpu;
    } catch (error) {
      const why = navigator.gpu ? `has WebGPU, but gives no device (${error.message})` : "has no WebGPU";
      say(
        `This browser ${why}. So nothing here runs on a GPU: the same methods run on one core of your processor, compiled to ` +
          "WebAssembly. That is slower by far, and says nothing about a GPU. Recent versions of Chrome, Edge, Safari and Firefox " +
          "have WebGPU on most devices, at addresses that begin with https or localhost.",
      );
    }
  }
  describe(undefined);
  return Session.cpu();
}

function describe(device, info) {
  const { device: section } = sections;
  const facts = device
    ? {
        GPU: [info?.description, info?.vendor, info?.architecture].filter(Boolean).join(", ") || "the browser does not say which",
        "Kernel path": { floor: "floor: what every WebGPU device has", f16: "f16: with 16-bit floats", subgroups: "subgroups" }[device.path] ?? device.path,
        "16-bit floats": device.f16 ? "yes" : "no",
        Timestamps: device.timestamps ? "yes" : "no: times are those of the page's clock",
        "Largest buffer": mebibytes(device.buffer_bytes),
        "Largest binding": mebibytes(device.binding_bytes),
        "Storage buffers of a kernel": device.storage_buffers,
        "Workgroup memory": `${device.workgroup_bytes / 1024} KiB, ${device.workgroup_invocations} invocations`,
      }
    : { Processor: "one core, WebAssembly" };
  section.dataset.name = device ? `${facts.GPU} (WebGPU, ${device.path})` : "CPU, one core in WebAssembly";
  section.dataset.path = device?.path ?? "cpu";
  section.querySelector(".status").textContent = device ? "WebGPU" : "No GPU in use";
  section.querySelector("dl").replaceChildren(
    ...Object.entries(facts).flatMap(([name, value]) => [made("dt", name), made("dd", value)]),
  );
}

function deviceLost(reason) {
  say(`The GPU device was lost: ${reason.replace(/\.+$/, "") || "the browser gives no reason"}. What was measured before stands; reload the page to go on.`);
  for (const button of document.querySelectorAll("button.run")) button.disabled = true;
  reject(Object.assign(new Error("the device was lost"), { name: "DeviceLost" }));
}

// --- runs -----------------------------------------------------------------------------------------------------------

const rows = { check: [] };
let benchRun;
let qualityRun;

/** Joins a section's buttons to its measurement. */
async function run(name, measure, report) {
  const section = sections[name];
  const [start, save] = [section.querySelector(".run"), section.querySelector(".save")];
  if (name === "check") start.textContent = countOf(wantedChecks());
  if (name === "bench") offerShapes(section);
  save.onclick = () => download(`kvpack-${name}.json`, report());
  start.disabled = false;
  start.onclick = async () => {
    setBusy(true);
    section.dataset.state = "running";
    try {
      await measure(section);
      section.dataset.state = "done";
    } catch (error) {
      section.dataset.state = "stopped";
      status(section, error.name === "DeviceLost" ? "Stopped: the GPU device was lost." : `Stopped: ${error.message ?? error}`);
    }
    section.querySelector("progress").hidden = true;
    setBusy(false);
  };
}

/** The names of the checks that the address asks for; with part=2/3 the second of three equal parts of them. */
function wantedChecks() {
  const names = session.checks(options.get("cases") === "all", options.get("filter") ?? "");
  const [part, parts] = (options.get("part") ?? "1/1").split("/").map(Number);
  const edge = (number) => Math.floor((names.length * number) / parts);
  return names.slice(edge(part - 1), edge(part));
}

function countOf(checks) {
  return `Run ${checks.length} ${checks.length === 1 ? "check" : "checks"}`;
}

function setBusy(busy) {
  const gone = notice.textContent.startsWith("The GPU device was lost");
  for (const control of document.querySelectorAll("button.run, select")) control.disabled = busy || gone;
}

async function check(section) {
  const names = wantedChecks();
  const list = section.querySelector(".cases");
  const begin = performance.now();
  rows.check = [];
  list.replaceChildren();
  for (const [index, name] of names.entries()) {
    progress(section, index, names.length, name);
    await pause();
    const row = await orLost(session.check(name));
    rows.check.push(row);
    const item = made("li", row.reason ? `${row.check}: ${row.reason}` : row.check);
    item.className = row.outcome;
    item.title = `${seconds(row.milliseconds)}, ${row.of}`;
    list.append(item);
    section.querySelector(".save").hidden = false;
    section.dataset.firstResult ??= Math.round(performance.now());
  }
  const count = (outcome) => rows.check.filter((row) => row.outcome === outcome).length;
  const unsupported = count("unsupported") ? `, ${count("unsupported")} unsupported` : "";
  status(section, `${count("passed")} passed, ${count("failed")} failed${unsupported} in ${seconds(performance.now() - begin)}`);
}

function offerShapes(section) {
  const select = section.querySelector("select");
  const names = { "g4-b32-8k": "32 × 8192 tokens (1 GB)", "g3-d64-b8-8k": "8 × 8192 tokens (50 MB)", "g4-b1-4k": "1 × 4096 tokens (17 MB)", "g1-b1-4k": "1 × 4096 tokens, 8 heads (17 MB)" };
  const choices = [["", "what suits the device"], ...session.benchShapes().map((name) => [name, names[name] ?? name])];
  select.replaceChildren(...choices.map(([value, label]) => Object.assign(made("option", label), { value })));
  select.value = options.get("shape") ?? "";
  select.disabled = false;
}

async function bench(section) {
  progress(section, 0, 1, "the data");
  await inFront(section);
  benchRun = await orLost(session.bench(section.querySelector("select").value || undefined));
  const formats = chosen(benchRun.formats());
  for (const [done, [index, name]] of formats.entries()) {
    // A browser slows what is not seen down: such a row is measured again.
    for (;;) {
      await inFront(section);
      progress(section, done, formats.length, name);
      await pause();
      const away = leaving();
      await orLost(benchRun.row(index));
      if (!away()) break;
      benchRun.discardLast();
    }
    showBench(section);
  }
  status(section, `Measured on ${sections.device.dataset.name}.`);
}

function showBench(section) {
  const [shape] = benchRun.report().shapes;
  const timed = shape.rows.filter((row) => row.outcome === "timed");
  const bar = (row) => ({
    label: short(row.format),
    value: row.gigabytes_per_second,
    brief: duration(row.step_us),
    note: `${duration(row.step_us)} · ${number(row.gigabytes_per_second)} GB/s`,
  });
  if (timed.length > 0) draw(section, (place) => bars(place, timed.map(bar), benchRun.read));
  const cells = (row) =>
    row.outcome === "timed"
      ? [short(row.format), number(row.bytes / 1e6), number(row.step_us), number(row.gigabytes_per_second), `${row.percent_of_read.toFixed(0)} %`,
         row.times_f16 ? number(row.times_f16) : "–", row.nmse.toExponential(0)]
      : [short(row.format), "–", `${row.outcome}: ${row.reason}`];
  table(section, ["width", "MB read", "µs", "GB/s", "of read", "× f16", "NMSE"], shape.rows.map(cells));
  section.querySelector(".save").hidden = false;
}

async function quality(section) {
  progress(section, 0, 1, "the data");
  const answer = await fetch("smollm2_kv.safetensors");
  if (!answer.ok) throw new Error(`the data could not be loaded: ${answer.status} ${answer.statusText}`);
  qualityRun = await orLost(session.quality(new Uint8Array(await answer.arrayBuffer())));
  const formats = chosen(qualityRun.formats());
  for (const [done, [index, name]] of formats.entries()) {
    progress(section, done, formats.length, name);
    await pause();
    await orLost(qualityRun.row(index));
    showQuality(section);
  }
  status(section, `Measured on ${sections.device.dataset.name}.`);
}

function showQuality(section) {
  const { formats } = qualityRun.report();
  const points = formats.map((row) => ({ label: short(row.format), bits: row.bits_per_element, error: row.error }));
  draw(section, (place) => curve(place, points));
  const cells = (row) => [short(row.format), row.bits_per_element.toFixed(2), kibibytes(row.bytes), `${number(row.times_smaller)} ×`, percent(row.error)];
  table(section, ["width", "bits per element", "stored", "smaller", "error"], formats.map(cells));
  section.querySelector(".save").hidden = false;
}

/** The formats that the address asks for, with their places in the list. */
function chosen(formats) {
  return [...formats.entries()].filter(([, name]) => name.includes(options.get("format") ?? ""));
}

// --- waiting --------------------------------------------------------------------------------------------------------

/** The promise, or a rejection as soon as the device is lost. */
function orLost(promise) {
  return Promise.race([promise, lost]);
}

/** Lets the page draw. Unlike timers, messages are not slowed down in a tab that nobody sees. */
function pause() {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => resolve(port1.close());
    port2.postMessage(null);
  });
}

/** Waits until the tab is seen. */
async function inFront(section) {
  if (document.visibilityState === "visible") return;
  status(section, "Waiting: times are only taken while this tab is in front.");
  await orLost(new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })));
  await inFront(section);
}

/** Watches the tab; the function it yields says whether it was left since. */
function leaving() {
  let left = document.visibilityState !== "visible";
  const note = () => (left ||= document.visibilityState !== "visible");
  document.addEventListener("visibilitychange", note);
  return () => {
    document.removeEventListener("visibilitychange", note);
    return left;
  };
}

// --- the page -------------------------------------------------------------------------------------------------------

function say(message) {
  notice.textContent = message;
  notice.hidden = false;
}

function status(section, message) {
  section.querySelector(".status").textContent = message;
}

function progress(section, done, all, what) {
  const bar = section.querySelector("progress");
  Object.assign(bar, { hidden: false, max: all, value: done });
  status(section, `${done} of ${all}: ${what}`);
}

const drawings = new Map();
addEventListener("resize", () => drawings.forEach((drawing, place) => drawing(place)));

/** Draws now, and anew whenever the window has another width. */
function draw(section, drawing) {
  const place = section.querySelector(".plot");
  drawings.set(place, drawing);
  drawing(place);
}

function table(section, header, lines) {
  const row = (cells, kind) => {
    const line = document.createElement("tr");
    line.append(...cells.map((cell) => made(kind, cell)));
    if (cells.length < header.length) line.lastChild.colSpan = header.length - cells.length + 1;
    return line;
  };
  const whole = document.createElement("table");
  whole.append(row(header, "th"), ...lines.map((cells) => row(cells, "td")));
  section.querySelector(".table").replaceChildren(whole);
}

function download(name, report) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(report, null, 2)], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
  URL.revokeObjectURL(url);
}

function made(name, content) {
  const element = document.createElement(name);
  element.textContent = content;
  return element;
}

/** "4-bit per channel" is "4 bits", as the page has one format of each width. */
function short(format) {
  const [, bits] = /^(?:K )?(\d)-bit/.exec(format) ?? [];
  return bits ? `${bits} bit${bits === "1" ? "" : "s"}` : format;
}

function mebibytes(bytes) {
  return `${number(bytes / 2 ** 20)} MiB`;
}

function kibibytes(bytes) {
  return `${number(bytes / 1024)} KiB`;
}

function duration(microseconds) {
  return microseconds < 1e4 ? `${number(microseconds)} µs` : `${number(microseconds / 1e3)} ms`;
}

function seconds(milliseconds) {
  return `${(milliseconds / 1000).toFixed(1)} s`;
}
