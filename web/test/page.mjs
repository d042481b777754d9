// Runs the page in a headless Chromium.
//
//   node page.mjs PROGRAM FOLDER SHOTS           a few cases, one row of each measurement, what goes wrong, screenshots
//   node page.mjs PROGRAM FOLDER SHOTS --all     every check and every row as well; SHOTS/checks.json has the times
//
// PROGRAM serves FOLDER; screenshots go to SHOTS.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { availableParallelism } from "node:os";
import { join } from "node:path";
import { launch, open, run, ended, serve } from "./chromium.mjs";

const [program, folder, shots, all] = process.argv.slice(2);
mkdirSync(shots, { recursive: true });
const server = await serve(program, folder);
const browser = await launch();
let passed = 0;
let failed = 0;

// A check of each kind, and both types of outputs of 16 bits.
const oneOfEachKind = "f16-output,states-4bit,pack-4bit-channel,stats-one-token,top-k-ties,evict-equal-keys,chunks-of-16";

await test("measures on WebGPU", async () => {
  const { page, errors } = await open(browser.context, `${server.link}?filter=${oneOfEachKind}&format=2-bit&shape=g1-b1-4k`);
  expect((await page.locator("#device").innerText()).includes("swiftshader"), "the device is SwiftShader");
  const checked = await run(page, "check");
  expect(checked.status.startsWith("11 passed, 0 failed in"), `${checked.status}; ${await page.locator("#check .failed").allInnerTexts()}`);
  console.log(`  ${checked.status}`);
  console.log(`  first result ${await page.locator("#check").getAttribute("data-first-result")} ms after the page began to load`);
  expect((await run(page, "bench")).state === "done", "the benchmark ends");
  expect((await run(page, "quality")).state === "done", "the measurement of quality ends");
  const report = await downloaded(page, "bench");
  // The address asks for 2 bits; f16 is there all the same, and the others are compared with it.
  const [f16, row] = report.shapes[0].rows;
  expect(f16.format === "f16" && row.format.startsWith("2-bit"), "f16 comes first");
  // A row is discarded where other work on this machine disturbs it, and then nothing is compared.
  const timed = f16.outcome === "timed" && row.outcome === "timed";
  if (!timed) console.log(`  not compared: f16 ${f16.outcome}, ${row.format} ${row.outcome}`);
  expect(!timed || Math.abs(row.times_f16 - f16.step_us / row.step_us) < 1e-6, `× f16 is ${row.times_f16}: ${JSON.stringify(f16)}`);
  expect(row.recipe === "calibquant:2" && row.spread.samples > 1, JSON.stringify(row));
  const widths = await page.locator("#bench .plot rect").evaluateAll((bars) => bars.map((bar) => Number(bar.getAttribute("width"))));
  expect(!timed || (widths.length === 2 && widths[0] / widths[1] > 0.9 * (f16.step_us / row.step_us)), "bars are times");
  expect(report.shapes[0].shape === "g1-b1-4k" && row.outcome === "timed" && row.nmse < 1e-4 && row.step_us > 0, JSON.stringify(report));
  const { formats } = await downloaded(page, "quality");
  expect(formats.length === 1 && formats[0].error > 0 && formats[0].error < 1 && formats[0].times_smaller > 3, JSON.stringify(formats));
  const name = await page.locator("#quality td").first().innerText();
  expect(name === "calibquant:2+sink=128+window=128", `the recipe can be pasted: ${name}`);
  expect((await downloaded(page, "check")).cases.every((row) => row.outcome === "passed"), "the cases are in the JSON");
  writeFileSync(join(shots, "bench.json"), JSON.stringify(report));
  await photograph(page, "measured");
  expect(errors.length === 0, `console: ${errors}`);
});

await test("runs the CPU twin where there is no WebGPU", async () => {
  const hide = () => Object.defineProperty(Navigator.prototype, "gpu", { get: () => undefined });
  const { page, errors } = await open(browser.context, `${server.link}?filter=shape-g1-d64`, hide);
  expect((await page.locator("#notice").innerText()).includes("has no WebGPU"), "the page says so");
  const checked = await run(page, "check");
  expect(checked.status.startsWith("1 passed, 0 failed"), checked.status);
  expect((await run(page, "quality")).state === "done", "the measurement of quality ends");
  await photograph(page, "no-webgpu");
  expect(errors.length === 0, `console: ${errors}`);
});

await test("stops, and goes on after that", async () => {
  const { page } = await open(browser.context, `${server.link}?filter=${oneOfEachKind}`);
  expect((await page.locator("#estimate").innerText()).startsWith("About"), "all of it has an estimate");
  expect(await page.locator("#stop").isHidden(), "nothing runs that could be stopped");
  await page.locator("#all").click();
  await page.locator("#check .cases li").first().waitFor({ timeout: 60_000 });
  await page.locator("#stop").click();
  const stopped = await ended(page, "check", 60_000);
  expect(stopped.state === "stopped" && stopped.status.includes("you stopped it"), stopped.status);
  expect((await page.locator("#bench").getAttribute("data-state")) === null, "the others do not begin");
  expect((await page.locator("#stop").isHidden()) && (await page.locator("#check .run").isEnabled()), "it can begin again");
});

await test("says what of the address is nonsense", async () => {
  const { page } = await open(browser.context, `${server.link}?filter=nonsense&format=nonsense&shape=nonsense`);
  expect((await page.locator("#bench .status").innerText()).includes('no shape "nonsense"'), "the shape");
  for (const [section, what] of [["check", "no check's name contains"], ["bench", "no format's name contains"], ["quality", "no format's name contains"]]) {
    const { state, status } = await run(page, section);
    expect(state === "stopped" && status.includes(what), `${section}: ${status}`);
  }
  const other = await browser.context.newPage();
  await other.goto(`${server.link}?path=nonsense`);
  await other.locator("#notice:not([hidden])").waitFor({ timeout: 30_000 });
  expect((await other.locator("#notice").innerText()).includes("the paths are floor"), "the path");
});

await test("can be used without seeing it", async () => {
  const { page } = await open(browser.context, server.link);
  const unnamed = await page.locator("progress:not([aria-label])").count();
  const silent = await page.locator('section .status:not([role="status"])').count();
  expect(unnamed === 0 && silent === 0, `${unnamed} bars without a name, ${silent} lines that are not announced`);
  expect((await page.locator('a[href*="github.com"]').count()) >= 1, "a link to the project");
  for (const colorScheme of ["light", "dark"]) {
    await page.emulateMedia({ colorScheme });
    const ratios = await page.evaluate(contrasts);
    expect(ratios.every(([, ratio]) => ratio >= 4.5), `${colorScheme}: ${JSON.stringify(ratios)}`);
  }
});

await test("says what the browser refuses", async () => {
  const spoil = () => {
    const create = GPUDevice.prototype.createShaderModule;
    GPUDevice.prototype.createShaderModule = function (descriptor) {
      return create.call(this, { ...descriptor, code: `${descriptor.code}\nnonsense` });
    };
  };
  const { page } = await open(browser.context, `${server.link}?filter=shape-g1-d64`, spoil);
  const checked = await run(page, "check");
  expect(checked.status.startsWith("0 passed, 1 failed"), checked.status);
  const reason = await page.locator("#check .failed").innerText();
  expect(reason.includes("compilation of a kernel") && reason.includes("nonsense"), reason);
});

await test("says when a buffer is too large, and when there is no memory", async () => {
  for (const [size, expected] of [[2 ** 40, "max buffer size"], ["memory", "has no room"]]) {
    const spoil = (size) => {
      const [create, pop] = [GPUDevice.prototype.createBuffer, GPUDevice.prototype.popErrorScope];
      let short = 0;
      GPUDevice.prototype.createBuffer = function (descriptor) {
        if (!descriptor.label?.startsWith("tiles of keys")) return create.call(this, descriptor);
        if (size !== "memory") return create.call(this, { ...descriptor, size });
        short += 1;
        return create.call(this, descriptor);
      };
      // No browser runs out of memory on demand: the scope of such a buffer yields what it would then.
      GPUDevice.prototype.popErrorScope = async function () {
        const error = short > 0 ? new GPUOutOfMemoryError("no memory") : undefined;
        short = 0;
        return error ?? pop.call(this);
      };
      if (size !== "memory") GPUDevice.prototype.popErrorScope = pop;
    };
    const { page } = await open(browser.context, `${server.link}?filter=shape-g1-d64`);
    await page.evaluate(spoil, size);
    const checked = await run(page, "check");
    expect(checked.status.startsWith("0 passed, 1 failed"), checked.status);
    const reason = await page.locator("#check .failed").innerText();
    expect(reason.toLowerCase().includes(expected), reason);
    await page.close();
  }
});

await test("stops when the device is lost", async () => {
  const remember = () => {
    const request = GPUAdapter.prototype.requestDevice;
    GPUAdapter.prototype.requestDevice = async function (...given) {
      return (window.lastDevice = await request.apply(this, given));
    };
  };
  const { page } = await open(browser.context, `${server.link}?cases=all`, remember);
  await page.locator("#check .run").click();
  await page.locator("#check .cases li").first().waitFor({ timeout: 60_000 });
  await page.evaluate(() => window.lastDevice.destroy());
  const stopped = await ended(page, "check", 30_000);
  expect(stopped.state === "stopped" && stopped.status.includes("the GPU device was lost"), stopped.status);
  expect((await page.locator("#notice").innerText()).includes("was lost"), "the page says so");
  expect(await page.locator("#bench .run").isDisabled(), "nothing more can be started");
  await photograph(page, "device-lost", ["desktop-light"]);
});

await test("takes times in front only", async () => {
  const { page, errors } = await open(browser.context, `${server.link}?format=2-bit&shape=g1-b1-4k&filter=shape-g1-d64`);
  const turn = (state) => {
    Object.defineProperty(Document.prototype, "visibilityState", { configurable: true, get: () => state });
    document.dispatchEvent(new Event("visibilitychange"));
  };
  await page.evaluate(turn, "hidden");
  await page.locator("#bench .run").click();
  await page.locator("#bench .status", { hasText: "Waiting" }).waitFor({ timeout: 30_000 });
  await page.evaluate(turn, "visible");
  expect((await ended(page, "bench")).state === "done", "it goes on when the tab is in front");
  // Left while the data are made and the bandwidth is measured: both are taken again.
  await page.evaluate(async () => {
    const { Session } = await import("./kvpack.js");
    const bench = Session.prototype.bench;
    window.benches = 0;
    Session.prototype.bench = function (...given) {
      window.benches += 1;
      const turn = (state) => {
        Object.defineProperty(Document.prototype, "visibilityState", { configurable: true, get: () => state });
        document.dispatchEvent(new Event("visibilitychange"));
      };
      if (window.benches === 1) ["hidden", "visible"].forEach(turn);
      return bench.apply(this, given);
    };
  });
  expect((await run(page, "bench")).state === "done", "it measures again");
  expect((await page.evaluate(() => window.benches)) === 2, "the bandwidth that was taken behind other tabs is discarded");
  await page.evaluate(turn, "hidden");
  expect((await run(page, "check")).status.startsWith("1 passed"), "checks go on behind other tabs");
  expect(errors.length === 0, `console: ${errors}`);
});

await test("plots errors that are finite and above zero", async () => {
  const { page } = await open(browser.context, server.link);
  const drawn = await page.evaluate(async () => {
    const { curve } = await import("./plot.js");
    const place = document.createElement("div");
    return [[NaN, 0, null, Infinity, 0.01], [NaN, 0]].map((errors) => {
      curve(place, errors.map((error, bits) => ({ label: "a", bits, error })));
      return place.querySelectorAll("circle").length;
    });
  });
  expect(String(drawn) === "1,0", `points drawn: ${drawn}`);
});

await test("serves engines", async () => {
  const { page } = await open(browser.context, server.link);
  const differences = await page.evaluate(engine);
  expect(differences.shared && differences.type === "GPUBuffer", "tensors are buffers of the device");
  expect(differences.most < 1e-3, `attention differs by ${differences.most}`);
  expect(differences.halves === "1,-2", `uploadF16 takes bits: ${differences.halves}`);
  expect(differences.wrong.every((name) => name === "Plan"), `numbers: ${differences.wrong}`);
  expect(differences.arrays.every((name) => name === "Buffer"), `arrays: ${differences.arrays}`);
  expect(differences.refused === "Format" || differences.refused === "HeadDim", `${differences.refused}`);
});

if (all) {
  // Compiling kernels takes most of the time, and a browser compiles one after the other: one browser for each core.
  await test("passes every case", async () => {
    const parts = Math.max(1, availableParallelism());
    const begin = Date.now();
    const reports = await Promise.all(Array.from({ length: parts }, (_, i) => everyCase(`${i + 1}/${parts}`)));
    const cases = reports.flat();
    const count = (outcome) => cases.filter((row) => row.outcome === outcome).length;
    console.log(`  ${cases.length} checks in ${((Date.now() - begin) / 1000).toFixed(0)} s: ${count("passed")} passed, ${count("failed")} failed, ${count("unsupported")} unsupported`);
    writeFileSync(join(shots, "checks.json"), JSON.stringify(cases, null, 1));
    expect(cases.length > 0 && cases.every((row) => row.outcome === "passed"), "every case passes");
  });
  await test("measures every width", async () => {
    const { page, errors } = await open(browser.context, `${server.link}?shape=g1-b1-4k`);
    expect((await run(page, "bench", 3_600_000)).state === "done", "the benchmark ends");
    expect((await run(page, "quality", 3_600_000)).state === "done", "the measurement of quality ends");
    await photograph(page, "every-width");
    expect(errors.length === 0, `console: ${errors}`);
  });
}

await browser.close();
server.stop();
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${passed} passed; ${failed} failed`);
process.exit(failed ? 1 : 0);

// --- what the tests stand on ----------------------------------------------------------------------------------------

async function test(name, body) {
  const begin = Date.now();
  try {
    await body();
    passed += 1;
    console.log(`ok ${name} (${((Date.now() - begin) / 1000).toFixed(1)} s)`);
  } catch (error) {
    failed += 1;
    console.log(`FAILED ${name}: ${error.stack ?? error}`);
  }
  for (const page of browser.context.pages()) await page.close();
}

function expect(truth, what) {
  if (!truth) throw new Error(`not so: ${what}`);
}

async function downloaded(page, section) {
  const [download] = await Promise.all([page.waitForEvent("download"), page.locator(`#${section} .save`).click()]);
  return JSON.parse(readFileSync(await download.path(), "utf8"));
}

/** Runs a part of all cases in a browser of its own, and says each as it ends; a case that takes ten minutes hangs. */
async function everyCase(part) {
  const own = await launch();
  try {
    const { page, errors } = await open(own.context, `${server.link}?cases=all&part=${part}`);
    await page.locator("#check .run").click();
    let told = 0;
    let changed = Date.now();
    for (;;) {
      const [state, status, names] = await page.evaluate(() => {
        const check = document.getElementById("check");
        const items = [...check.querySelectorAll(".cases li")].map((item) => `${item.className} ${item.textContent} (${item.title})`);
        return [check.dataset.state, check.querySelector(".status").textContent, items];
      });
      for (const name of names.slice(told)) console.log(`  ${part} ${name}`);
      if (names.length > told) changed = Date.now();
      told = names.length;
      if (state === "done") break;
      expect(state === "running" && Date.now() - changed < 600_000, `part ${part} goes on: ${status}`);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
    expect(errors.length === 0, `console: ${errors}`);
    return (await downloaded(page, "check")).cases;
  } finally {
    await own.close();
  }
}

/** In the page: contrast of text on what it stands on, by the formula of WCAG. */
function contrasts() {
  const style = getComputedStyle(document.documentElement);
  const luminance = (name) => {
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16) / 255);
    const linear = (x) => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const pairs = [["--text", "--ground"], ["--text", "--card"], ["--muted", "--card"], ["--accent", "--card"], ["--on-accent", "--accent"],
    ["--on-bar", "--bar"], ["--on-baseline", "--baseline"], ["--bad", "--card"], ["--good", "--card"]];
  return pairs.map(([a, b]) => {
    const [x, y] = [luminance(a), luminance(b)];
    return [`${a} on ${b}`, (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05)];
  });
}

/** Screenshots in the widths of a desktop and of a phone, light and dark; nothing may be wider than the screen. */
async function photograph(page, name, only) {
  for (const [device, size] of [["desktop", { width: 1280, height: 900 }], ["phone", { width: 390, height: 844 }]]) {
    for (const colorScheme of ["light", "dark"]) {
      const shot = `${device}-${colorScheme}`;
      if (only && !only.includes(shot)) continue;
      await page.setViewportSize(size);
      await page.emulateMedia({ colorScheme });
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      expect(wide <= 0, `${shot}: the page is ${wide} pixels wider than the screen`);
      const cut = await page.evaluate(() => {
        const beyond = (inner, outer) => inner.left < outer.left - 1 || inner.right > outer.right + 1;
        const marks = [...document.querySelectorAll(".plot svg text")].map((mark) => [mark, mark.ownerSVGElement]);
        const tables = [...document.querySelectorAll(".table table")].map((table) => [table, table.parentElement]);
        const all = [...marks, ...tables].filter(([inner, outer]) => beyond(inner.getBoundingClientRect(), outer.getBoundingClientRect()));
        return all.map(([inner]) => inner.textContent);
      });
      expect(cut.length === 0, `${shot}: cut off: ${cut.join("; ")}`);
      await page.screenshot({ path: join(shots, `${name}-${shot}.png`), fullPage: true });
    }
  }
}

/** In the page: a cache filled through buffers that a program of its own wrote, against plain attention. */
async function engine() {
  const { default: init, Gpu, Cache } = await import("./kvpack.js");
  await init();
  const gpu = await Gpu.open();
  const [heads, headDim, tokens] = [2, 64, 200];
  const wave = (length, rate) => Float32Array.from({ length }, (_, i) => Math.sin(i * rate) * 0.5);
  const [keys, values, query] = [wave(tokens * headDim, 0.37), wave(tokens * headDim, 0.53), wave(heads * headDim, 0.11)];
  const tensor = (elements) => {
    const made = gpu.tensor(elements.length, "f32");
    gpu.device.queue.writeBuffer(made.buffer, 0, elements); // as a kernel of the engine's would
    return made;
  };
  const last = (tokens - 1) * headDim;
  const cache = new Cache(gpu, heads, 1, headDim, 1, "f16");
  await cache.prefill(0, tensor(keys.subarray(0, last)), tensor(values.subarray(0, last)), 0, 0);
  await cache.append(tensor(keys.subarray(last)), tensor(values.subarray(last)));
  const given = tensor(query);
  const output = await (await cache.attend(given)).read();
  let most = 0;
  for (let head = 0; head < heads; head += 1) {
    const scores = Array.from({ length: tokens }, (_, t) => {
      let sum = 0;
      for (let c = 0; c < headDim; c += 1) sum += query[head * headDim + c] * keys[t * headDim + c];
      return Math.exp(sum / Math.sqrt(headDim));
    });
    const total = scores.reduce((a, b) => a + b);
    for (let c = 0; c < headDim; c += 1) {
      const want = scores.reduce((sum, score, t) => sum + score * values[t * headDim + c], 0) / total;
      most = Math.max(most, Math.abs(want - output[head * headDim + c]));
    }
  }
  let refused;
  try {
    new Cache(gpu, heads, 1, 63, 1, "f16");
  } catch (error) {
    refused = error.name;
  }
  const numbers = [
    () => gpu.tensor(2 ** 32 + 64, "f32"), () => gpu.tensor(0.9, "f32"), () => gpu.tensor(-1, "f32"), () => gpu.tensor(undefined, "f32"),
    () => new Cache(gpu, heads, 1, headDim, 1.5, "f16"), () => cache.tokens(), () => cache.tokens(2 ** 32), () => cache.prefill(0, given, given),
  ];
  const others = [undefined, null, [1, 2], new Float64Array(2), new BigInt64Array(2)];
  const uploads = [
    ...[...others, new Float32Array(2)].map((array) => () => gpu.uploadF16(array)),
    ...[...others, new Uint16Array(2)].map((array) => () => gpu.uploadF32(array)),
  ];
  const outcome = async (call) => {
    const late = new Promise((resolve) => setTimeout(resolve, 5000, "never settled"));
    try {
      return await Promise.race([Promise.resolve(call()).then(() => "accepted"), late]);
    } catch (error) {
      return error.name;
    }
  };
  const [wrong, arrays] = [await Promise.all(numbers.map(outcome)), await Promise.all(uploads.map(outcome))];
  const halves = String(await (await gpu.uploadF16(new Uint16Array([0x3c00, 0xc000]))).read());
  return { most, refused, wrong, arrays, halves, type: given.buffer.constructor.name, shared: gpu.device instanceof GPUDevice };
}
