"""What `prove` does not see of BullMQ in TypeScript: SQLite, flows, the Discord bot."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from guide import stacks
from harness.missing import missing
from harness.redis import RedisServer

pytestmark = pytest.mark.slow

# SQLite in WebAssembly, because better-sqlite3 has to be compiled and node:sqlite needs Node 22.
PACKAGES = {"discord": [], "sqlite": ["node-sqlite3-wasm@0.8.60"]}


def run(script: str, redis: RedisServer, package: str = "") -> Any:
    """What the script printed last, as JSON. It stands beside the compiled modules."""
    try:
        folder = stacks.install("bullmq-ts") / package
    except stacks.NotHere as error:
        missing("bullmq-ts", str(error))
    if package:
        folder.mkdir(exist_ok=True)
        done = folder / "node_modules" / ".locked"
        if not done.is_file() or done.read_text() != str(PACKAGES[package]):
            # `--prefix .`: npm would otherwise install into the folder above, which has a package.json.
            npm(["install", "--prefix", ".", "--ignore-scripts", "--no-save", *PACKAGES[package]], folder)
            done.write_text(str(PACKAGES[package]))
    if (folder / "tsconfig.json").is_file() and package:
        subprocess.run(["npx", "--no-install", "tsc", "-p", "."], cwd=folder, check=True, timeout=300)
    (folder / "script.mjs").write_text(script.replace("REDIS_PORT", str(redis.port)))
    ran = subprocess.run(["node", "script.mjs"], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def npm(words: list[str], folder: Path) -> None:
    command = [shutil.which("npm") or "npm", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        missing("npm install", done.stderr[-300:])


QUEUE = """
import { FlowProducer, Queue, UnrecoverableError, Worker } from 'bullmq';
const connection = { host: '127.0.0.1', port: REDIS_PORT, maxRetriesPerRequest: null };
const until = async (done) => {
  for (const end = Date.now() + 60_000; !(await done()); await new Promise((go) => setTimeout(go, 50))) {
    if (Date.now() > end) throw new Error(`waited for ${done}`);
  }
};
"""


def test_a_flow_whose_part_fails_for_good_fails_visibly_and_a_stock_one_waits_forever(
    own_redis: RedisServer,
) -> None:
    script = """
import { flow } from './reliable.js';
const parts = new Worker('parts', async () => { throw new UnrecoverableError('no address'); }, { connection });
const whole = new Worker('whole', async () => 'done', { connection });
const flows = new FlowProducer({ connection });
const parent = (jobId) => ({ name: 'whole', queueName: 'whole', data: {}, opts: { jobId } });
const child = { name: 'part', queueName: 'parts', data: {} };
await flows.add({ ...parent('stock'), children: [child] });
await flows.add(flow(parent('ours'), [child]));
const queue = new Queue('whole', { connection });
await until(async () => (await queue.getJobState('ours')) === 'failed');
await until(async () => (await new Queue('parts', { connection }).getFailedCount()) === 2);
const reason = (await queue.getJob('ours')).failedReason;
console.log(JSON.stringify({ stock: await queue.getJobState('stock'), reason }));
process.exit(0);
"""
    found = run(QUEUE + script, own_redis)
    assert found["stock"] == "waiting-children"
    assert "failed" in found["reason"]


def test_the_inbox_on_sqlite_takes_effect_once_and_announces_what_committed(own_redis: RedisServer) -> None:
    script = """
import { announceSync, onceSync, relaySync, SQLITE_TABLES } from '../sqlite.js';
import wasm from 'node-sqlite3-wasm';
const file = new wasm.Database(':memory:');
// Its statements take their values in a list.
const db = { exec: (text) => file.exec(text), prepare: (text) => ({
  run: (...values) => file.run(text, values),
  get: (...values) => file.get(text, values),
  all: (...values) => file.all(text, values) }) };
db.exec(SQLITE_TABLES + 'CREATE TABLE labels (parcel TEXT)');
const buy = (parcel, fails) => onceSync(db, 'labels', 'p1', { parcel, weight: 1 }, () => {
  db.prepare('INSERT INTO labels VALUES (?)').run(parcel);
  announceSync(db, 'mails', 'mail', `mail-${parcel}`, { parcel });
  if (fails) throw new Error('no paper');
  return { label: 7 };
});
const errors = [];
const attempt = (work) => { try { return work(); } catch (error) { errors.push(error.message); } };
attempt(() => buy('p1', true));
const results = [buy('p1'), buy('p1')];
attempt(() => buy('other'));
const mails = new Queue('mails', { connection });
const relayed = [await relaySync(db, { mails }, {}), await relaySync(db, { mails }, {})];
const job = await mails.getJob('mail-p1');
const labels = db.prepare('SELECT count(*) AS n FROM labels').get().n;
console.log(JSON.stringify({ errors, results, relayed, labels, data: job.data }));
process.exit(0);
"""
    assert run(QUEUE + script, own_redis, "sqlite") == {
        "errors": ["no paper", "p1 was used for another payload"],
        "results": [{"label": 7}, {"label": 7}],
        "relayed": [1, 0],
        "labels": 1,
        "data": {"parcel": "p1"},
    }


def test_a_discord_command_is_deferred_first_and_answered_once_by_the_worker(own_redis: RedisServer) -> None:
    """The types are discord.js's own, the queue is real, the reply goes to a server of this test.

    Not shown: Discord's gateway, its own limits and the login. The interaction is an object of this test.
    """
    script = """
import { createServer } from 'node:http';
import { DiscordAPIError, REST } from 'discord.js';
import { onCommand, reply } from './bot.js';
const said = [];
const interaction = (id, defer) => ({
  id, applicationId: 'app', token: 'secret-token', options: { getString: () => 'p1' },
  deferReply: async () => { said.push(`defer ${id}`); if (defer) throw defer; },
  editReply: async (text) => { said.push(`edit ${id}`); } });
const queue = new Queue('labels', { connection });
const add = queue.add.bind(queue);
queue.add = async (...words) => { said.push('add'); return add(...words); };
await onCommand(interaction('1'), queue);
await onCommand(interaction('1'), queue);
const taken = new DiscordAPIError({ code: 40060, message: 'acknowledged' }, 40060, 400, 'POST', 'url', {});
await onCommand(interaction('2', taken), queue);
await onCommand(interaction('3'), { add: async () => { throw new Error('Redis is away'); } });
const waiting = await queue.getWaitingCount();
const writes = [];
const server = createServer((request, answer) => {
  let body = '';
  request.on('data', (part) => (body += part));
  request.on('end', () => {
    writes.push(`${request.method} ${request.url} ${JSON.parse(body).content} ${request.headers.authorization ?? ''}`);
    answer.writeHead(200, { 'content-type': 'application/json' }).end('{}');
  });
}).listen(0, '127.0.0.1');
await new Promise((up) => server.once('listening', up));
const rest = new REST({ api: `http://127.0.0.1:${server.address().port}/api` });
let late = '';
const worker = new Worker('labels', async (job) => {
  await reply(rest, job, 'Label 7');
  await reply(rest, { ...job, timestamp: 0 }, 'too late').catch((error) => (late = error.name));
}, { connection });
await until(() => queue.getCompletedCount());
console.log(JSON.stringify({ said, waiting, writes, late }));
process.exit(0);
"""
    assert run(QUEUE + script, own_redis, "discord") == {
        "said": ["defer 1", "add", "defer 1", "add", "defer 2", "defer 3", "edit 3"],
        "waiting": 1,
        "writes": ["PATCH /api/v10/webhooks/app/secret-token/messages/@original Label 7 "],
        "late": "UnrecoverableError",
    }
