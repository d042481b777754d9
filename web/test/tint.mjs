// Gives every WGSL text that a browser may get to Tint, the compiler of Chromium, without a GPU.
//
//   node tint.mjs FOLDER       the texts, one file each: tests/shaders/main.rs writes them
//
// Dawn's null backend compiles nothing for a device, but its front end parses and validates as it does in the browser.
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import { create } from "webgpu";

const folder = process.argv[2];
const gpu = create(["backend=null"]); // Dawn ends when nothing holds this
const device = await openDevice();

// Zero errors mean something only where an error is seen.
const refused = {
  "a text that is no WGSL": "fn f( {",
  "subgroups that are not enabled": "@compute @workgroup_size(32) fn f() { _ = subgroupMax(1u); }",
};
for (const [what, code] of Object.entries(refused)) {
  if ((await errorsOf(code)).length === 0) throw new Error(`Tint accepted ${what}`);
}

const files = readdirSync(folder).filter((name) => name.endsWith(".wgsl")).sort();
if (files.length === 0) throw new Error(`no texts in ${folder}`);
let failed = 0;
for (const file of files) {
  const errors = await errorsOf(readFileSync(join(folder, file), "utf8"));
  if (errors.length === 0) continue;
  failed += 1;
  if (failed <= 10) console.log(`${file}: ${errors[0].lineNum}:${errors[0].linePos} ${errors[0].message}`);
}
console.log(`Tint compiled ${files.length} texts of ${folder}`);
console.log(`test result: ${failed ? "FAILED" : "ok"}. ${files.length - failed} passed; ${failed} failed`);
process.exit(failed ? 1 : 0);

async function openDevice() {
  const adapter = await gpu.requestAdapter();
  const wanted = ["shader-f16", "subgroups"];
  const missing = wanted.filter((feature) => !adapter.features.has(feature));
  if (missing.length > 0) throw new Error(`Dawn's null adapter lacks ${missing}: texts that use it would be refused`);
  return adapter.requestDevice({ requiredFeatures: wanted });
}

async function errorsOf(code) {
  device.pushErrorScope("validation"); // the compilation info says the same
  const info = await device.createShaderModule({ code }).getCompilationInfo();
  await device.popErrorScope();
  return info.messages.filter((message) => message.type === "error");
}
