"""What `prove` does not see of BullMQ in TypeScript: SQLite, flows, the Discord bot, bullmq 5, Python beside it."""

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import psycopg
import pytest

from guide import stacks
from harness.missing import missing
from harness.redis import RedisServer
from harness.waiting import until
from harness.workers import counts, queue_at

pytestmark = pytest.mark.slow

# SQLite in WebAssembly, because better-sqlite3 has to be compiled and node:sqlite needs Node 22.
PACKAGES = {"discord": [], "sqlite": ["node-sqlite3-wasm@0.8.60"], "bullmq-5": ["bullmq@5.81.5"]}
MAJORS = pytest.mark.parametrize("package", ["", "bullmq-5"], ids=["bullmq-6", "bullmq-5"])
PYTHON_WORKER = Path(__file__).parents[1] / "reference" / "faults" / "programs" / "worker_under_fault.py"


@functools.cache
def home(package=""):
    """A folder with the compiled modules, or one below it with another package; compiled once per run."""
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
    if package == "bullmq-5":
        for name in ("inbox.ts", "reliable.ts", "shop.ts", "sqlite.ts", "tsconfig.json"):
            shutil.copy(folder.parent / name, folder)
    if (folder / "tsconfig.json").is_file() and package:
        subprocess.run(["npx", "--no-install", "tsc", "-p", "."], cwd=folder, check=True, timeout=300)
    return folder


def written(script, redis, folder, name="script.mjs"):
    (folder / name).write_text(script.replace("REDIS_PORT", str(redis.port)))
    return folder / name


def run(script, redis, package=""):
    """What the script printed last, as JSON. It runs beside the compiled modules."""
    path = written(script, redis, home(package))
    ran = subprocess.run(["node", path], cwd=path.parent, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def npm(words, folder):
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


@MAJORS
def test_a_flow_whose_part_fails_for_good_fails_visibly_and_a_stock_one_waits_forever(
    own_redis: RedisServer, package: str
):
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
    answer = run(QUEUE + script, own_redis, package)
    assert answer["stock"] == "waiting-children"
    assert "failed" in answer["reason"]


def test_the_inbox_on_sqlite_takes_effect_once_and_announces_what_committed(own_redis):
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


def test_a_discord_command_is_deferred_first_and_answered_once_by_the_worker(own_redis):
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


LABELS = """
import pg from 'pg';
import { z } from 'zod';
import { TABLES } from './inbox.js';
import { jobType, reliableWorker } from './reliable.js';
const pool = new pg.Pool({ connectionString: 'STORE' });
await pool.query(`${TABLES} CREATE TABLE IF NOT EXISTS labels (parcel text)`);
const label = jobType(z.object({ parcel: z.string() }), async ({ parcel }) => {
  console.log('start');
  await new Promise((go) => setTimeout(go, 300));
  return (tx) => tx.query('INSERT INTO labels VALUES ($1)', [parcel]);
});
reliableWorker('labels', { label }, pool, { connection, concurrency: 4, lockDuration: 2000, stalledInterval: 700 });
"""


@MAJORS
@pytest.mark.fault
@pytest.mark.needs_postgres
async def test_a_queue_shared_with_python_loses_nothing_when_workers_of_either_side_are_killed(
    own_redis: RedisServer, postgres_url: str, spawn: Any, package: str
):
    script = """
import { JOB } from './reliable.js';
const queue = new Queue('labels', { connection });
const options = { ...JOB, backoff: { type: 'exponential', delay: 100, jitter: 1 } };
await queue.addBulk(Array.from({ length: 12 }, (_, n) => (
  { name: 'label', data: { parcel: `ts-${n}` }, opts: { ...options, jobId: `label-ts-${n}` } })));
console.log(JSON.stringify(await queue.getWaitingCount()));
process.exit(0);
"""
    assert run(QUEUE + script, own_redis, package) == 12
    store = postgres_url.replace("+psycopg", "").partition("?")[0]
    labels = written((QUEUE + LABELS).replace("STORE", store), own_redis, home(package), "labels.mjs")
    spec = {"kind": "reliable", "port": own_redis.port, "queue": "labels", "work": "sleep", "seconds": 0.3}
    spec["options"] = {"concurrency": 4, "lock_duration": 2.0, "stalled_interval": 0.7}
    sides = {
        "python": lambda: spawn(PYTHON_WORKER, json.dumps(spec)),
        "typescript": lambda: spawn.command("node", labels, cwd=labels.parent),
    }
    async with queue_at(own_redis.url, "labels") as queue:
        for done, side in ((12, "python"), (24, "typescript")):
            for _ in range(2):
                victim = sides[side]()
                await victim.line("start", 60)
                victim.kill()
            left = sides[side]()

            async def all_done(done=done):
                return await counts(queue) == {"completed": done}

            await until(all_done, 60, lambda left=left: str(left))  # type: ignore[misc]
            left.kill()
            for n in range(12 if side == "python" else 0):
                await queue.add("label", {"parcel": f"py-{n}"}, {"attempts": 8, "jobId": f"label-py-{n}"})
    with psycopg.connect(store) as db:
        rows = db.execute("SELECT parcel, count(*) FROM labels GROUP BY parcel").fetchall()
    assert sorted(rows) == sorted((f"py-{n}", 1) for n in range(12))


def test_bullmq_5_and_6_run_the_jobs_of_each_other(own_redis):
    script = """
const queue = new Queue('ADDS', { connection });
await queue.add('plain', {});
await queue.add('delayed', {}, { delay: 300 });
await queue.add('prioritized', {}, { priority: 5 });
await queue.add('retried', {}, { attempts: 3, backoff: { type: 'fixed', delay: 50 } });
await queue.upsertJobScheduler('nightly', { every: 400 }, { name: 'scheduled' });
const seen = new Set();
if ('WORKS') new Worker('WORKS', async (job) => {
  if (job.name === 'retried' && job.attemptsMade < 1) throw new Error('not yet');
  seen.add(job.name);
}, { connection });
await until(() => !'WORKS' || seen.size === 5);
console.log(JSON.stringify([...seen].sort()));
process.exit(0);
"""
    kinds = ["delayed", "plain", "prioritized", "retried", "scheduled"]
    for package, adds, works in (("", "six", ""), ("bullmq-5", "five", "six"), ("", "more", "five")):
        ran = run(QUEUE + script.replace("ADDS", adds).replace("WORKS", works), own_redis, package)
        assert ran == (kinds if works else [])


def test_where_bullmq_5_and_6_differ(own_redis):
    script = """
const queue = new Queue('VERSION', { connection });
let ticks = 0;
const worker = new Worker('VERSION', async () => { ticks++; }, { connection });
await queue.add('tick', {}, { repeat: { every: 200 } });
// Counted where both note what ticks again.
const repeats = (await queue.getJobSchedulersCount()) > 0;
await until(() => ticks > (repeats ? 2 : 0));
await worker.close();
const debounced = { debounce: { id: 'a', ttl: 1000 } };
const debounce = await queue.add('a', {}, debounced).then(() => 'taken', (error) => error.message);
const paused = 'paused' in (await queue.getJobCounts());
console.log(JSON.stringify([repeats, debounce, paused, 'getRepeatableJobs' in queue]));
process.exit(0);
"""
    gone = "Debounce option has been removed. Use deduplication option instead"
    for package, answer in (("bullmq-5", [True, "taken", True, True]), ("", [False, gone, False, False])):
        assert run(QUEUE + script.replace("VERSION", package or "bullmq-6"), own_redis, package) == answer
        bullmq = json.loads((home(package) / "node_modules" / "bullmq" / "package.json").read_text())
        assert "ioredis" in bullmq["dependencies" if package else "peerDependencies"]


def test_resume_of_bullmq_5_drops_what_others_added_to_a_paused_queue(own_redis):
    """5 keeps the jobs of a paused queue in a list of its own and renames it over `wait`, where 6 and Python add."""
    script = """
const queue = new Queue('shared', { connection });
if (!RESUMES) await queue.pause();
await queue.add('a', {});
if (RESUMES) await queue.resume();
console.log(await queue.getWaitingCount());
process.exit(0);
"""
    assert run(QUEUE + script.replace("RESUMES", "false"), own_redis) == 1
    # Two jobs, and nobody will run the first.
    assert run(QUEUE + script.replace("RESUMES", "true"), own_redis, "bullmq-5") == 1
    with own_redis.client() as redis:
        assert redis.exists("bull:shared:1", "bull:shared:2") == 2
        assert redis.lrange("bull:shared:wait", 0, -1) == ["2"]
