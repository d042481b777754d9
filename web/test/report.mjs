// The pages of `kvpack demo`, `kvpack eval --report` and `kvpack compare` in headless Chromium: nothing on the console, the
// plots there, nothing wider than the screen, and every point says what it is. Screenshots are for people to look at.
//
//   node report.mjs SHOTS PAGE.html...
import { mkdirSync } from "node:fs";
import { basename, join, resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { launch } from "./chromium.mjs";

const SCREENS = [
  { name: "light", size: { width: 1280, height: 900 }, scheme: "light" },
  { name: "dark", size: { width: 1280, height: 900 }, scheme: "dark" },
  { name: "phone", size: { width: 390, height: 844 }, scheme: "light" },
];

const [shots, ...pages] = process.argv.slice(2);
if (!shots || pages.length === 0) {
  console.error("node report.mjs SHOTS PAGE.html...");
  process.exit(2);
}
mkdirSync(shots, { recursive: true });

let passed = 0;
const failures = [];

function expect(there, what) {
  if (there) passed += 1;
  else failures.push(what);
}

async function look(context, file, { name, size, scheme }) {
  const what = `${basename(file)}, ${name}`;
  const page = await context.newPage();
  const errors = [];
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  // The page needs no other file.
  page.on("request", (request) => /^(file|data):/.test(request.url()) || errors.push(`asks for ${request.url()}`));
  await page.emulateMedia({ colorScheme: scheme });
  await page.setViewportSize(size);
  await page.goto(pathToFileURL(resolve(file)).href);

  expect((await page.locator(".verdict li").count()) > 0, `${what}: no verdict`);
  expect((await page.locator("figure svg .point").count()) > 0, `${what}: no points`);
  expect((await page.locator("table tbody tr").count()) > 0, `${what}: no table`);
  const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  expect(wide <= 0, `${what}: ${wide} pixels wider than the screen`);
  const outside = await page.evaluate(() => {
    const inside = (box, frame) => box.left >= frame.left - 1 && box.right <= frame.right + 1 && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
    const marks = [...document.querySelectorAll("figure > svg circle, figure > svg text")];
    return marks.filter((mark) => !inside(mark.getBoundingClientRect(), mark.ownerSVGElement.getBoundingClientRect())).map((mark) => mark.textContent || "a point");
  });
  expect(outside.length === 0, `${what}: outside of its plot: ${outside.join(", ")}`);
  await page.screenshot({ path: join(shots, `${basename(file, ".html")}-${name}.png`), fullPage: true });

  const point = page.locator("figure svg .point").first();
  await point.focus();
  const tip = page.locator("#tip");
  expect((await tip.isVisible()) && (await tip.innerText()).length > 10, `${what}: a point says nothing`);
  const ground = await page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  expect((scheme === "dark") === (ground !== "rgb(255, 255, 255)"), `${what}: the ground is ${ground}`);
  expect(errors.length === 0, `${what}: ${errors.join("; ")}`);
  await page.close();
}

const { context, close } = await launch();
try {
  for (const file of pages) for (const screen of SCREENS) await look(context, file, screen);
} finally {
  await close();
}
failures.forEach((failure) => console.error(`FAILED ${failure}`));
console.log(`screenshots in ${shots}`);
console.log(`test result: ${failures.length ? "FAILED" : "ok"}. ${passed} passed; ${failures.length} failed`);
process.exit(failures.length ? 1 : 0);
