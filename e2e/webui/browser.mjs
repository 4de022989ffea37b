// Drives a Chromium for the tests: one JSON request on a line of standard input,
// {op, …}, one answer on a line of standard output, {value} or {error}.
import { createInterface } from 'node:readline';
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { chromium } from 'playwright-core';

const o = JSON.parse(process.argv[2]); // executable, args
const patience = 60_000; // ms; a host may be busy
const profiles = new Map();
const tabs = new Map();
let last = 0;

function watch(profile, page) {
  const tab = { page, profile, visited: [], complaints: [], status: 0 };
  page.on('request', (r) => {
    if (r.isNavigationRequest() && r.frame() === page.mainFrame()) tab.visited.push(`${r.method()} ${r.url()}`);
  });
  page.on('response', (r) => {
    if (r.request().isNavigationRequest() && r.request().frame() === page.mainFrame()) tab.status = r.status();
  });
  page.on('console', (m) => { if (m.type() === 'error') tab.complaints.push(`${m.location().url || page.url()}: ${m.text()}`); });
  page.on('dialog', (d) => { tab.complaints.push(`${page.url()}: a dialog: ${d.message()}`); d.dismiss(); });
  page.on('pageerror', (e) => tab.complaints.push(`${page.url()}: a script failed: ${e}`));
  tabs.set(++last, tab);
  return last;
}

const state = (tab) => ({ url: tab.page.url(), status: tab.status });

const ops = {
  // Without Chromium's sandbox, which does not start as root, nor in many
  // containers: all that it loads is of this repository.
  // A profile is a fresh one, in dir; noCookiesOf names a host whose cookies it blocks.
  async open({ dir, noCookiesOf }) {
    if (noCookiesOf) {
      mkdirSync(join(dir, 'Default'), { recursive: true });
      const exceptions = { cookies: { [`[*.]${noCookiesOf},*`]: { setting: 2 } } };
      writeFileSync(join(dir, 'Default', 'Preferences'), JSON.stringify({ profile: { content_settings: { exceptions } } }));
    }
    const context = await chromium.launchPersistentContext(dir, { executablePath: o.executable, args: o.args, headless: true, chromiumSandbox: false, timeout: patience });
    context.setDefaultTimeout(patience);
    profiles.set(++last, context);
    return last;
  },
  async tab({ profile }) { return watch(profile, await profiles.get(profile).newPage()); },
  async close({ profile }) { await profiles.get(profile).close(); },
  async go({ tab, url }) {
    const t = tabs.get(tab);
    await t.page.goto(url, { waitUntil: 'load' }).catch((e) => { if (!/ERR_|interrupted/.test(e)) throw e; t.status = 0; });
    return state(t);
  },
  // Clicks, and waits for the page that it leads to.
  async click({ tab, at }) {
    const t = tabs.get(tab);
    await Promise.all([t.page.waitForNavigation({ waitUntil: 'load' }), t.page.click(at)]);
    return state(t);
  },
  async back({ tab }) {
    const t = tabs.get(tab);
    await t.page.goBack({ waitUntil: 'load' });
    return state(t);
  },
  async fill({ tab, at, text }) { await tabs.get(tab).page.fill(at, text); },
  async select({ tab, at, text }) { await tabs.get(tab).page.selectOption(at, text); },
  async count({ tab, at }) { return tabs.get(tab).page.locator(at).count(); },
  async text({ tab }) { return tabs.get(tab).page.innerText('body'); },
  async cookies({ profile }) { return profiles.get(profile).cookies(); },
  async visited({ tab }) { return tabs.get(tab).visited; },
  async complaints({ tab }) { return tabs.get(tab).complaints; },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { op, ...args } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await ops[op](args)) ?? null };
  } catch (e) {
    answer = { error: String(e) };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
await Promise.all([...profiles.values()].map((c) => c.close().catch(() => {})));
process.exit(0);
