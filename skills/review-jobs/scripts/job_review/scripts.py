"""TypeScript and JavaScript, by pattern. Comments are blanked out before."""

import re
from collections.abc import Iterator
from pathlib import Path

from .project import Project
from .rules import Hit
from .text import KEYED, MANY, SECRET, THROTTLE, arguments, calls, closing, line_at, plain_inserts, replaced_rows

LOG = r"(?:console|log|logger|jobLog|\w*[lL]og)\.(?:log|debug|info|warn|error)"
SENDS = r"\b(\w+)\.(?:add|addBulk|publish|xAdd|xadd|send|sendToQueue)\s*\("
RANDOM = r"randomUUID\(|uuidv?[147]?\(|nanoid\(|Date\.now\(|Math\.random\(|ulid\("
BROWSER = re.compile(r"\b(document|window)\.|['\"](?:@angular/core|react|vue|svelte)['\"]")
# What each process must do for itself.
LOCAL = re.compile(
    r"heartbeat|keep_?alive|\bping|renew|watch|check\w*Worker|inactive|cache|health|metric|gauge|progress|flush",
    re.IGNORECASE,
)
SLOTTED = re.compile(r"\bslots?\b|ON CONFLICT|advisory_lock|redlock", re.IGNORECASE)


def findings(path: Path, text: str, project: Project) -> Iterator[Hit]:
    uses = project.uses[path]
    # The timers of a browser page are its own.
    if path.suffix not in (".tsx", ".jsx") and not BROWSER.search(text):
        for match, call in calls(text, r"(?<!function )\bsetInterval"):
            if not LOCAL.search(text[text.rfind("\n", 0, match.start()) + 1 : match.start()] + call):
                yield "interval-loop", line_at(text, match.start())
    yield from _keys_and_locks(text)
    yield from _errors(text, uses)
    yield from _calls(text, uses)
    yield from _logs(text)
    yield from _sends(text)
    yield from _brokers(text, uses)
    for line in replaced_rows(text):
        yield "replace-effect-row", line
    if "BullMQ" in uses:
        yield from _bullmq(path, text, project)


def _queues(text: str) -> str:
    """A pattern for the names of queues: by name, or made here."""
    made = re.findall(r"\b(\w+)\s*(?::[^=\n]*)?=\s*new\s+Queue\b", text)
    return r"\b(?:" + "|".join([r"\w*[qQ]ueue\w*", *made]) + ")"


def _keys_and_locks(text: str) -> Iterator[Hit]:
    for match, call in calls(text, r"\.set"):
        if re.search(r"['\"]NX['\"]|\bNX\s*:\s*true", call) and not THROTTLE.search(call):
            # The answer is not used: a shared value, not a marker.
            if re.search(r"[;{}]\s*(?:await\s+)?[\w.?]+$", text[max(0, match.start() - 200) : match.start()]):
                continue
            around = text[match.start() : match.start() + 900]
            before = text[max(0, match.start() - 400) : match.start() + 200]
            lock = re.search(r"lock|cron|leader", before, re.IGNORECASE)
            # A lock's token is compared where it is released, anywhere in the file.
            if re.search(r"\.eval\s*\(|redlock", text if lock else around, re.IGNORECASE):
                continue
            # Read back: a value that is made once, not a marker.
            if not lock and re.search(r"\.get\s*\(", around.split("\n}", maxsplit=1)[0]):
                continue
            # Named a lock, or released somewhere in the file.
            locks = lock and ("lock" in call.lower() or re.search(r"\.del\s*\(", text))
            yield "lock-without-token" if locks else "set-nx-idempotency", line_at(text, match.start())
    for match in re.finditer(r"\bidempotency[_-]?key['\"]?\s*[:=,]\s*([^\n]*)", text, re.IGNORECASE):
        value = match[1]
        if simple := re.match(r"\w+", value):
            made = re.search(rf"\b(?:const|let)\s+{simple[0]}\s*=\s*([^\n]*)", text)
            value = made[1] if made and simple[0] not in ("crypto", "uuid", "uuidv4", "nanoid", "job") else value
        if re.search(r"\bjob\??\.id\b", value):
            yield "job-id-as-key", line_at(text, match.start())
        elif re.search(RANDOM, value) and not re.search(
            r"\.add\s*\([^)]*$", text[max(0, match.start() - 160) : match.start()]
        ):
            yield "key-per-try", line_at(text, match.start())


def _errors(text: str, uses: set[str]) -> Iterator[Hit]:
    for match in re.finditer(r"attemptsMade\s*(>=|===?|>)\s*[^;\n]*attempts", text):
        yield "attempts-made-filter", line_at(text, match.start())
    for match, handler in calls(text, r"\.on(?=\s*\(\s*['\"]failed['\"])"):
        if re.search(r"\.(add|insert|create|save|rpush|xadd|xAdd)\s*\(", handler):
            yield "listener-dead-letter", line_at(text, match.start())
    for match, handler in calls(text, r"process\.(?:on|once)(?=\s*\(\s*['\"]SIG(?:TERM|INT)['\"])"):
        body = handler
        if named := re.search(r",\s*(\w+)\s*\)$", handler):
            body += "".join(body for _, body in _bodies(text, named[1]))
        if re.search(_queues(text) + r"\.add(?:Bulk)?\s*\(", body):
            yield "readd-on-stop", line_at(text, match.start())
    for start, body in _processors(text):
        for match in re.finditer(r"\bcatch\s*(?:\([^)]*\))?\s*\{", body):
            handler = body[match.end() - 1 : closing(body, match.end() - 1)]
            rest = re.sub(LOG + r"\s*\([^\n]*\)|capture\w*\([^\n]*\)", "", handler)
            if not re.search(r"\bthrow\b|\w\s*\(", rest):
                yield "swallowed-error", line_at(text, start + match.start())
        for match in re.finditer(r"\b(for|while)\s*\(", body):
            opened = body.find("{", closing(body, match.end() - 1))
            loop = body[opened : closing(body, opened)] if opened >= 0 else ""
            counted = re.match(
                r"for\s*\(\s*let\s+\w+\s*=\s*\d+\s*;[^;]*<=?\s*(\d|\w*(?:attempt|tries|retr))",
                body[match.start() :],
                re.IGNORECASE,
            )
            calls_out = re.search(r"\b(?:fetch|axios[.\w]*)\s*\(", loop) and re.search(r"\b(?:break|return)\b", loop)
            waits = re.search(r"\bcatch\b", loop) and re.search(r"setTimeout|sleep\(|delay\(", loop)
            if waits or (counted and calls_out):
                yield "inner-retry", line_at(text, start + match.start())
        if not KEYED.search(text):
            for position in plain_inserts(body):
                yield "insert-without-marker", line_at(text, start + position)
    if uses:
        for match in re.finditer(r"\b(?:pRetry|axiosRetry|asyncRetry|backOff)\s*\(", text):
            yield "inner-retry", line_at(text, match.start())
    if (
        uses
        and _processors(text)
        and not re.search(r"UnrecoverableError|\.status\s*(<|>|===?)|\.status\)|status\s*>=?\s*[45]00", text)
    ):
        for match in re.finditer(r"if\s*\(\s*!\s*\w+\.ok\s*\)\s*\{?\s*throw", text):
            yield "retried-4xx", line_at(text, match.start())


def _processors(text: str) -> list[tuple[int, str]]:
    """(position, body) of the functions that a worker or a consumer calls."""
    # NestJS: a class with the method.
    hosted = re.finditer(r"\basync\s+process\s*\([^)]*\)[^{]*", text) if "WorkerHost" in text else ()
    bodies = [(match.end(), text[match.end() : closing(text, match.end())]) for match in hosted]
    for match, call in calls(text, r"new\s+Worker\s*(?:<[^>]*>)?|\.consume|\beachMessage\s*:\s*async"):
        start = match.end() - 1
        if "eachMessage" in match[0]:
            begin = text.find("{", start + len(call))
            bodies.append((begin, text[begin : closing(text, begin)]))
            continue
        bodies.append((start, call))
        for named in re.findall(r",\s*(\w+)\s*(?=[,)])", call):
            bodies += _bodies(text, named)
    return bodies


def _bodies(text: str, function: str) -> list[tuple[int, str]]:
    made = rf"function\s+{function}\s*\([^)]*\)[^{{]*|\b{function}\s*(?::[^=]*)?=\s*(?:async\s*)?\([^)]*\)\s*=>\s*"
    return [(begun.end(), text[begun.end() : closing(text, begun.end())]) for begun in re.finditer(made, text)]


def _calls(text: str, uses: set[str]) -> Iterator[Hit]:
    for match, call in calls(text, r"waitUntilFinished"):
        if len(arguments(call)) < 2:
            yield "wait-without-ttl", line_at(text, match.start())
    if not uses:
        return
    if not re.search(r"defaults\.timeout|axios\.create\s*\([^)]*timeout", text):
        for match, call in calls(text, r"\baxios(?:\.(?:get|post|put|patch|delete|request))?"):
            if "timeout" not in call and "signal" not in call:
                yield "http-no-timeout", line_at(text, match.start())
    for match, call in calls(text, r"(?<![.\w])fetch"):
        if "signal" not in call and not re.search(r",\s*\w+\s*\)$", call):
            yield "fetch-no-signal", line_at(text, match.start())


def _logs(text: str) -> Iterator[Hit]:
    for match, call in calls(text, LOG):
        if re.search(r"\bjob\??\.data\b(?!\s*\??\.)", call):
            yield "payload-logged", line_at(text, match.start())
        shown = re.sub(r"'[^'\n]*'|\"[^\"\n]*\"|\b(?:redact|mask|hash|Boolean|Object\.keys)\w*\([^)]*\)", "", call)
        shown = re.sub(r"`(?:[^`$]|\$(?!\{))*`", "", shown)
        if re.search(rf"(?:\.|[{{,(]\s*)(?:{SECRET})\b(?!\s*[(:.\w])", shown, re.IGNORECASE):
            yield "secret-logged", line_at(text, match.start())


def _sends(text: str) -> Iterator[Hit]:
    for match, call in calls(text, r"Promise\.all"):
        if len(re.findall(r"\.(?:add|publish|xAdd)\s*\(", call)) >= 2:
            yield "gather-fan-out", line_at(text, match.start())
    wrapped = calls(text, r"(?:\$transaction|\.transaction|\bwithTransaction|\binTransaction)")
    transactions = [(match.end() - 1, inside) for match, inside in wrapped]
    for begun in re.finditer(r"query\(\s*['\"`]BEGIN['\"`]", text):
        inside, ended, _ = text[begun.end() :].partition("COMMIT")
        transactions.append((begun.end(), inside if ended else ""))
    sender = re.compile(rf"\w*(?:queue|bus|publisher|redis|producer|channel)\w*|{_queues(text)}", re.IGNORECASE)
    for start, inside in transactions:
        for call in re.finditer(SENDS, inside):
            if sender.fullmatch(call[1]):
                yield "publish-in-transaction", line_at(text, start + call.start())
    for match, call in calls(text, _queues(text) + r"\.add"):
        sent = [*arguments(call), "", ""][1]
        loaded = r"(?:\.(?:findUnique|findFirst|findOne\w*|findById|findByPk|save|getOne)\b|\.rows\[0\])"
        row = re.match(r"(?:\{\s*\.\.\.)?(\w+)\b(?:\s*\}|$|\.(?:toJSON|toObject)\(\))", sent)
        if re.search(r"\.(?:toJSON|toObject)\(\)", sent) or (
            row and re.search(rf"(?:const|let)\s+{row[1]}\b[^=\n]*=[^;\n]*{loaded}", text)
        ):
            yield "row-in-payload", line_at(text, match.start())


def _brokers(text: str, uses: set[str]) -> Iterator[Hit]:
    if first := re.search(r"xReadGroup|xreadgroup", text):
        if not re.search(r"xAck|xack", text):
            yield "stream-no-ack", line_at(text, first.start())
        if not re.search(r"xAutoClaim|xautoclaim|xClaim|xclaim", text):
            yield "stream-no-claim", line_at(text, first.start())
    for match in re.finditer(r"\bnoAck\s*:\s*true", text):
        yield "rabbit-auto-ack", line_at(text, match.start())
    if "Kafka" in uses:
        for match in re.finditer(r"['\"]enable\.auto\.commit['\"]\s*:\s*(?:true|['\"]true)", text):
            yield "kafka-auto-commit", line_at(text, match.start())
        # kafkajs commits what eachMessage resolved; eachBatch with eachBatchAutoResolve commits the batch.
        for match in re.finditer(r"\beachBatchAutoResolve\s*:\s*true", text):
            yield "kafka-auto-commit", line_at(text, match.start())
    if "node-cron" in uses and not SLOTTED.search(text):
        for match in re.finditer(
            r"\b(?:cron|nodeCron|schedule|scheduler)\.(?:schedule|scheduleJob)\s*\(|new\s+(?:CronJob|Cron)\s*\(|@Cron\s*\(",
            text,
        ):
            yield "scheduler-per-process", line_at(text, match.start())


def _bullmq(path: Path, text: str, project: Project) -> Iterator[Hit]:
    defaults = "defaultJobOptions" in text or (project.default_options and not re.search(r"\bnew\s+Queue\b", text))
    for match, call in calls(text, _queues(text) + r"\.add"):
        given = arguments(call)
        options = given[2] if len(given) > 2 else ""
        if (options and not options.startswith("{")) or "..." in options:
            continue  # built elsewhere
        if not defaults:
            if "attempts" not in options:
                yield "missing-attempts", line_at(text, match.start())
            if "removeOn" not in options:
                yield "missing-retention", line_at(text, match.start())
        if options and not re.search(r"\b(?:jobId|deduplication|repeat)\b", options) and re.match(r"\{\s*\w", given[1]):
            yield "add-without-id", line_at(text, match.start())
        if ident := re.search(r"jobId\s*:\s*([`'\"])(.*?)\1", options):
            if ":" in re.sub(r"\$\{[^}]*\}", "", ident[2]) or ident[2].isdigit():
                yield "colon-job-id", line_at(text, match.end() + call.index("jobId") - 1)
    major = project.bullmq_major(path)
    for match in re.finditer(r"\brepeat\s*:\s*\{", text):
        yield ("repeat-option" if major is None or major > 5 else "repeat-deprecated", line_at(text, match.start()))
    for match in re.finditer(r"\bgroupKey\s*:", text):
        yield "group-key", line_at(text, match.start())
    for match in re.finditer(r"removeOnFail\s*:\s*(?:true|(?:\{[^}]*\bcount\s*:\s*)?(\d[\d_]*))", text):
        if int(match[1] or 0) < MANY:
            yield "remove-on-fail-count", line_at(text, match.start())
    for match, call in calls(text, r"new\s+Worker\s*(?:<[^>]*>)?"):
        if not project.scripts_stop:
            yield "no-shutdown", line_at(text, match.start())
        if "maxStalledCount" not in call and not re.search(r",\s*\w*[oO]pt\w*\s*\)$|\.\.\.\s*\w+", call):
            yield "stall-default", line_at(text, match.start())
    for match in re.finditer(r"(\w*priorit\w*)[^=:\n]*[=:]\s*\{|enum\s+\w*priorit\w*\s*\{", text, re.IGNORECASE):
        listed = text[match.end() - 1 : closing(text, match.end() - 1)]
        named = [(key, int(number)) for key, number in re.findall(r"(\w+)\s*[:=]\s*(\d+)", listed)]
        urgent = [number for key, number in named if re.search(r"urgent|high|critical|vip|premium", key, re.IGNORECASE)]
        relaxed = [
            number for key, number in named if re.search(r"low|bulk|batch|normal|default|free", key, re.IGNORECASE)
        ]
        if urgent and relaxed and min(urgent) > min(relaxed):
            yield "inverted-priority", line_at(text, match.start())
    for match in re.finditer(
        r"priority\s*:\s*[^,\n?]*(?:urgent|high|critical|vip|premium)[^,\n?]*\?\s*(\d+)\s*:\s*(\d+)",
        text,
        re.IGNORECASE,
    ):
        if int(match[1]) > int(match[2]) > 0:
            yield "inverted-priority", line_at(text, match.start())
    if not re.search(r"prioritized|oldest", text, re.IGNORECASE):
        for match in re.finditer(r"\.getWaitingCount\s*\(|\.getJobCounts\s*\(\s*['\"]|\.llen\s*\([^)\n]*:wait\b", text):
            around = text[max(0, match.start() - 300) : match.start()]
            if re.search(r"health|ready|backlog|depth", around, re.IGNORECASE):
                yield "partial-health", line_at(text, match.start())
    # A plain URL: commands wait in the offline queue for as long as Redis is down.
    for match, call in calls(text, r"new\s+Queue\s*(?:<[^>]*>)?"):
        if re.search(r"connection\s*:\s*(?:\{\s*url\s*:[^,}]*\}|new\s+(?:IO)?Redis\s*\(\s*[^,{)]*\))", call):
            yield "redis-default-timeout", line_at(text, match.start())
