// A headless Chromium with WebGPU on SwiftShader, and the server of the page.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

/** Milliseconds that a machine four times as slow as an idle one of two processors needs, and as much again. */
export const PATIENCE = 240_000;

/** Serves a folder with the program that `make web` serves it with; yields the link and how to stop. */
export async function serve(program, folder) {
  const server = spawn(program, ["serve", folder], { stdio: ["ignore", "pipe", "inherit"] });
  const link = await new Promise((resolve, reject) => {
    createInterface({ input: server.stdout }).once("line", resolve);
    server.once("exit", (code) => reject(new Error(`the server ended with ${code}`)));
  });
  return { link, stop: () => server.kill() };
}

export async function launch() {
  const profile = mkdtempSync(join(tmpdir(), "kvpack-chromium-"));
  const context = await chromium.launchPersistentContext(profile, {
    executablePath: process.env.KVPACK_CHROMIUM ?? "/usr/bin/chromium",
    args: [
      "--headless=new",
      "--enable-unsafe-webgpu",
      "--use-webgpu-adapter=swiftshader",
      ...(process.getuid?.() === 0 ? ["--no-sandbox"] : []),
      // Nothing that the test does not ask for goes out to the network.
      "--disable-quic",
      "--no-first-run",
      "--disable-background-networking",
      "--disable-component-update",
      "--disable-sync",
    ],
  });
  context.setDefaultTimeout(PATIENCE);
  const close = async () => {
    await context.close();
    rmSync(profile, { recursive: true, force: true });
  };
  return { context, close };
}

/** A page whose console errors and exceptions are collected. */
export async function open(context, link, prepare) {
  const page = await context.newPage();
  const errors = [];
  page.on("console", (message) => message.type() === "error" && errors.push(message.text()));
  page.on("pageerror", (error) => errors.push(String(error)));
  if (prepare) await page.addInitScript(prepare);
  await page.goto(link);
  await page.locator("#check .run:not([disabled])").waitFor({ timeout: PATIENCE });
  return { page, errors };
}

/** Presses a section's button and waits until it is through; yields the state and what the section says. */
export async function run(page, section, timeout) {
  await page.locator(`#${section} .run`).click();
  return ended(page, section, timeout);
}

export async function ended(page, section, timeout = 4 * PATIENCE) {
  const place = page.locator(`#${section}[data-state=done], #${section}[data-state=stopped]`);
  await place.waitFor({ timeout });
  return { state: await place.getAttribute("data-state"), status: await place.locator(".status").innerText() };
}
