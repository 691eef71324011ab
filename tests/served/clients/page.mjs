// Opens the status page at some widths in a headless Chromium, tries it, and prints what was seen as one JSON document.
import { chromium } from "playwright-core";

const [url, executablePath, widths, pictures, password] = process.argv.slice(2);
const browser = await chromium.launch({
  executablePath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync"],
});

async function look(width) {
  const context = await browser.newContext({
    viewport: { width: Number(width), height: 900 },
    ...(password ? { httpCredentials: { username: "anyone", password } } : {}),
  });
  const page = await context.newPage();
  const problems = [];
  page.on("console", (message) => { if (message.type() === "error") problems.push(message.text()); });
  page.on("pageerror", (error) => problems.push(String(error)));
  const asked = [];
  page.on("request", (request) => asked.push(new URL(request.url()).host));

  await page.goto(url);
  await page.waitForSelector("#phase.ready");
  await page.waitForSelector(".tile");
  await page.fill("#prompt", "Say something.");
  await page.fill("#tokens", "12");
  await page.click("#send");
  await page.waitForFunction(() => !document.getElementById("send").disabled && document.getElementById("answer").textContent);
  await page.waitForSelector("#recent tr");
  const seen = await page.evaluate(() => ({
    model: document.getElementById("model").textContent,
    answer: document.getElementById("answer").textContent,
    failed: document.getElementById("answer").className,
    tiles: [...document.querySelectorAll(".tile span")].map((one) => one.textContent),
    recent: document.querySelectorAll("#recent tr").length,
    plan: document.querySelectorAll("#plan tr").length,
    overflow: document.documentElement.scrollWidth - window.innerWidth,
  }));
  if (pictures) await page.screenshot({ path: `${pictures}/${width}.png`, fullPage: true });
  await context.close();
  return { ...seen, problems, hosts: [...new Set(asked)] };
}

const seen = {};
for (const width of widths.split(",")) seen[width] = await look(Number(width));
await browser.close();
console.log(JSON.stringify(seen));
