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
  if (!session) return;
  await run("check", check, () => ({ backend: sections.device.dataset.name, cases: rows.check }));
  await run("bench", bench, () => named(benchRun.report()));
  await run("quality", quality, () => named(qualityRun.report()));
  offerAll();
}

/** A report under the name of the device, which the browser tells the page and not the library. */
function named(report) {
  return { ...report, backend: sections.device.dataset.name };
}

// --- the device -----------------------------------------------------------------------------------------------------

/** Paths that the address may ask for. */
const paths = ["floor", "f16", "subgroups", "matrices"];

async function open() {
  const nonsense = unknownOptions();
  if (nonsense) {
    describe(undefined);
    say(nonsense);
    sections.device.querySelector(".status").textContent = "Nothing was started.";
    return undefined;
  }
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

/** What of the address cannot be meant, in a sentence; nothing where all can. */
function unknownOptions() {
  const [path, backend, part] = [options.get("path"), options.get("backend"), options.get("part")];
  if (path !== null && !paths.includes(path)) return `The address asks for path=${path}; the paths are ${paths.join(", ")}.`;
  if (backend !== null && !["cpu", "gpu"].includes(backend)) return `The address asks for backend=${backend}; the backends are gpu and cpu.`;
  const [number, parts] = (part ?? "1/1").split("/").map(Number);
  if (!(number >= 1 && number <= parts)) return `The address asks for part=${part}; give a part and how many there are, as 1/4.`;
  return undefined;
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
    stopping = false;
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

/** Joins the buttons of the whole page: all three measurements, and an end after the row that is under way. */
function offerAll() {
  const [all, stop, estimate] = ["all", "stop", "estimate"].map((id) => document.getElementById(id));
  const checks = wantedChecks().length;
  // On Chromium's software driver a check took 10 s and a width 13 s; hardware takes a tenth of that.
  const slow = sections.device.dataset.path === "cpu" || /swiftshader|llvmpipe/i.test(sections.device.dataset.name);
  const estimated = (checks + 2 * 6) * (slow ? 10 : 1);
  estimate.textContent = `About ${estimated < 90 ? `${Math.max(10, Math.round(estimated / 10) * 10)} s` : `${Math.round(estimated / 60)} min`} for everything.`;
  all.disabled = false;
  all.onclick = async () => {
    for (const name of ["check", "bench", "quality"]) {
      await sections[name].querySelector(".run").onclick();
      if (stopping || sections[name].dataset.state === "stopped") break;
    }
  };
  stop.onclick = () => {
    stopping = true;
    stop.disabled = true;
    stop.textContent = "Stopping …";
  };
}

/** Set by the button that stops; the row that is under way ends first. */
let stopping = false;

/** Ends a run where it was asked to stop. */
function orStopped() {
  if (stopping) throw new Error("you stopped it. What was measured stands.");
}

/** The names of the checks that the address asks for; with part=2/3 the second of three equal parts of them. */
function wantedChecks() {
  const filter = options.get("filter") ?? "";
  const names = options.get("cases") === "all" ? session.checks(filter) : session.quickChecks(filter);
  const [part, parts] = (options.get("part") ?? "1/1").split("/").map(Number);
  const edge = (number) => Math.floor((names.length * number) / parts);
  return names.slice(edge(part - 1), edge(part));
}

function countOf(checks) {
  return `Run ${checks.length} ${checks.length === 1 ? "check" : "checks"}`;
}

function setBusy(busy) {
  const gone = notice.textContent.startsWith("The GPU device was lost");
  for (const control of document.querySelectorAll("button.run, select, #all")) control.disabled = busy || gone;
  const stop = document.getElementById("stop");
  Object.assign(stop, { hidden: !busy, disabled: false, textContent: "Stop" });
}

async function check(section) {
  const names = wantedChecks();
  if (names.length === 0) throw new Error(`no check's name contains "${options.get("filter") ?? ""}"; with ?cases=all every name is searched.`);
  const list = section.querySelector(".cases");
  const begin = performance.now();
  rows.check = [];
  list.replaceChildren();
  for (const [index, name] of names.entries()) {
    orStopped();
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
  const wanted = options.get("shape") ?? "";
  select.value = wanted;
  if (select.value !== wanted) {
    select.value = "";
    status(section, `There is no shape "${wanted}"; the page has ${session.benchShapes().join(", ")}.`);
  }
  select.disabled = false;
}

async function bench(section) {
  const start = () => {
    progress(section, 0, 1, "the data");
    return session.bench(section.querySelector("select").value || undefined);
  };
  benchRun = await seen(section, start, (run) => run.free());
  // f16 is always there: the others are compared with it.
  const formats = chosen(benchRun.formats(), "f16");
  for (const [done, [index, name]] of formats.entries()) {
    const row = async () => {
      progress(section, done, formats.length, name);
      await pause();
      return benchRun.row(index);
    };
    await seen(section, row, () => benchRun.discardLast());
    showBench(section);
  }
  status(section, `Measured on ${sections.device.dataset.name}.`);
}

function showBench(section) {
  const [shape] = benchRun.report().shapes;
  const timed = shape.rows.filter((row) => row.outcome === "timed");
  const bar = (row) => ({
    label: short(row.format),
    value: row.step_us,
    brief: duration(row.step_us),
    note: row.times_f16 && row.format !== "f16" ? `${duration(row.step_us)} · ${number(row.times_f16)} × f16` : duration(row.step_us),
    baseline: row.format === "f16",
  });
  if (timed.length > 0) draw(section, (place) => bars(place, timed.map(bar)));
  const cells = (row) =>
    row.outcome === "timed"
      ? [row.recipe ?? short(row.format), number(row.bytes / 1e6), number(row.step_us), spread(row), number(row.gigabytes_per_second),
         `${row.percent_of_read.toFixed(0)} %`, row.times_f16 ? number(row.times_f16) : "–", row.nmse.toExponential(0)]
      : [row.recipe ?? short(row.format), "–", `${row.outcome}: ${row.reason}`];
  table(section, ["recipe", "MB read", "µs", "±", "GB/s", "of read", "× f16", "NMSE"], shape.rows.map(cells));
  section.querySelector(".save").hidden = false;
}

async function quality(section) {
  progress(section, 0, 1, "the data");
  const answer = await fetch("smollm2_kv.safetensors");
  if (!answer.ok) throw new Error(`the data could not be loaded: ${answer.status} ${answer.statusText}`);
  qualityRun = await orLost(session.quality(new Uint8Array(await answer.arrayBuffer())));
  const formats = chosen(qualityRun.formats());
  for (const [done, [index, name]] of formats.entries()) {
    orStopped();
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
  const cells = (row) => [row.recipe ?? short(row.format), row.bits_per_element.toFixed(2), kibibytes(row.bytes), `${number(row.times_smaller)} ×`, percent(row.error)];
  table(section, ["recipe", "bits per element", "stored", "smaller", "error"], formats.map(cells));
  section.querySelector(".save").hidden = false;
}

/** The formats that the address asks for, with their places in the list, and the one that the others are compared with. */
function chosen(formats, baseline) {
  const wanted = options.get("format") ?? "";
  const fitting = [...formats.entries()].filter(([, name]) => name.includes(wanted));
  if (fitting.length === 0) throw new Error(`no format's name contains "${wanted}"; the formats are ${formats.join(", ")}.`);
  return [...formats.entries()].filter(([, name]) => name === baseline || name.includes(wanted));
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

/** The result of a measurement that was taken while the tab was in front. A browser slows down what is not seen. Such a
 * result is discarded, and the measurement repeated. */
async function seen(section, measure, discard) {
  for (;;) {
    orStopped();
    await inFront(section);
    const away = leaving();
    const measured = await orLost(measure()).finally(away);
    if (!away()) return measured;
    discard(measured);
  }
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

/** Draws now, and again whenever the width of the window changes. */
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

/** Half of the distance between the quartiles of the samples, in percent. */
function spread(row) {
  return row.spread ? `${(((row.spread.high_us - row.spread.low_us) / 2 / row.step_us) * 100).toFixed(1)} %` : "–";
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
