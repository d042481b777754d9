// Runs the quick conformance cases through Dawn without a browser, on the Vulkan adapter that VK_DRIVER_FILES leaves.
//
//   node dawn.mjs FOLDER PATH [FILTER]       FOLDER: the page as it was built; PATH: the path that the driver must have
import { readFileSync } from "node:fs";
import { join, resolve } from "node:path";
import { create, globals } from "webgpu";

const [folder, wanted, filter = ""] = process.argv.slice(2);
// What the page would have: wgpu looks for the class of windows, and for the navigator.
Object.assign(globalThis, globals, { Window: globalThis.constructor });
Object.defineProperty(globalThis, "navigator", { value: { gpu: create([]) }, configurable: true });

const { initSync, Session } = await import(resolve(folder, "kvpack.js"));
initSync({ module: readFileSync(join(folder, "kvpack_bg.wasm")) });
const session = await Session.gpu(wanted);
const { path } = session.device();
if (path !== wanted) throw new Error(`the driver has the path ${path}, ${wanted} is to be tested`);
const info = session.gpuDevice().adapterInfo;
console.log(`${info.description || info.device} (${info.vendor}), path ${path}`);

let failed = 0;
const names = session.quickChecks(filter);
for (const name of names) {
  const row = await session.check(name);
  console.log(`${row.outcome} ${row.check} ${row.nmse?.toExponential(1)} ${Math.round(row.milliseconds)} ms ${row.reason ?? ""}`);
  if (row.outcome !== "passed") failed += 1;
}
console.log(`test result: ${failed || names.length === 0 ? "FAILED" : "ok"}. ${names.length - failed} passed; ${failed} failed`);
process.exit(failed || names.length === 0 ? 1 : 0);
