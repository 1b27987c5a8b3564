"""Go, by pattern: asynq, Kafka, RabbitMQ, Redis Streams, cron. Comments are blanked out before."""

import re
from collections.abc import Iterator

from .rules import Hit
from .text import KEYED, SECRET, THROTTLE, arguments, calls, closing, line_at, plain_inserts, replaced_rows

# Parameters by which a function that handles messages is known.
MESSAGE = (
    r"\*asynq\.Task\b|\bamqp\.Delivery\b|\bkafka\.Message\b|\*sarama\.ConsumerMessage\b|\*nats\.Msg\b|\*river\.Job\["
)
LOG = r"\b(?:log|logger|slog|zap|\w*[lL]og(?:ger)?)\.(?:Print|Printf|Println|Info|Infof|Infow|Debug|Debugf|Warn|Warnf|Error|Errorf|Fatal|Fatalf)"
SENDS = r"\.(?:Enqueue|EnqueueContext|Publish|PublishWithContext|WriteMessages|SendMessage|XAdd|Produce)\s*\("
EFFECT = re.compile(
    r"(?:store|save|insert|update|charge|send|publish|enqueue|create|exec|delete|post|commit)\w*\($", re.IGNORECASE
)
SLOTTED = re.compile(r"\bslots?\b|ON CONFLICT|advisory_lock|redsync|asynq\.(?:TaskID|Unique)\(", re.IGNORECASE)


def findings(text: str, uses: set[str]) -> Iterator[Hit]:
    if "asynq" in uses:
        yield from _asynq(text)
    for start, body in _handlers(text):
        yield from ((rule, line_at(text, start + position)) for rule, position in _errors(body))
        if not KEYED.search(text):
            for position in plain_inserts(body):
                yield "insert-without-marker", line_at(text, start + position)
    yield from _brokers(text, uses)
    yield from _transactions(text)
    yield from _keys_and_calls(text, uses)
    for line in replaced_rows(text):
        yield "replace-effect-row", line
    for match, call in calls(text, LOG):
        if re.search(r"\.Payload\(\)", call):
            yield "payload-logged", line_at(text, match.start())
        shown = re.sub(r"\"[^\"\n]*\"|\b(?:redact|mask|hash|len)\w*\([^)]*\)", "", call, flags=re.IGNORECASE)
        if re.search(rf"(?:\.|[,(]\s*)(?:{SECRET})\b(?!\s*[(.\w])", shown, re.IGNORECASE):
            yield "secret-logged", line_at(text, match.start())


def _handlers(text: str) -> Iterator[tuple[int, str]]:
    for match, parameters in calls(text, r"\bfunc(?:\s*\([^)]*\))?(?:\s+\w+)?"):
        if re.search(MESSAGE, parameters):
            opened = text.find("{", match.end() - 1 + len(parameters))
            if opened >= 0:
                yield opened, text[opened : closing(text, opened)]


def _errors(body: str) -> Iterator[tuple[str, int]]:
    for match in re.finditer(r"\bif\b[^{\n]*\berr\s*!=\s*nil\s*\{", body):
        block = body[match.end() - 1 : closing(body, match.end() - 1)]
        ends = re.findall(r"\breturn\b([^\n}]*)", block)
        if ends and all(end.strip() == "nil" for end in ends) and not re.search(r"errors\.(Is|As)", match[0] + block):
            yield "swallowed-error", match.start()
        elif re.fullmatch(rf"\{{\s*(?:{LOG}\([^\n]*\)\s*)?\}}", block):
            yield "swallowed-error", match.start()
    for match in re.finditer(r"^\s*_\s*(?:,\s*_\s*)?=\s*[\w.]+\(", body, re.MULTILINE):
        # Before an error is returned, it is only a second one.
        returned = re.match(r"[^\n]*\n(?:[^\n}]*\n){0,2}\s*return\s+(?!nil\s*\n)", body[match.end() :])
        if EFFECT.search(match[0]) and not returned:
            yield "swallowed-error", match.end() - 1
    for match in re.finditer(r"\bfor\b[^{\n]*\{", body):
        loop = body[match.end() - 1 : closing(body, match.end() - 1)]
        if "time.Sleep(" in loop and re.search(r"err\s*[!=]=\s*nil", loop):
            yield "inner-retry", match.start()


def _asynq(text: str) -> Iterator[Hit]:
    made = {match[1]: call for match, call in calls(text, r"\b(\w+)(?:,\s*\w+)?\s*:?=\s*asynq\.NewTask")}
    for match, call in calls(text, r"\.Enqueue(?:Context)?"):
        given = arguments(call)
        options = call + made.get(given[-1] if given else "", "") + "".join(made.get(name, "") for name in given)
        known = "asynq.NewTask(" in call or any(name in made for name in given)
        if "..." in options or not known:
            continue  # built elsewhere
        if not (re.search(r"\bMaxRetry\(", options) and re.search(r"\b(?:Timeout|Deadline)\(", options)):
            yield "asynq-defaults", line_at(text, match.start())
    for match in re.finditer(r"\basynq\.NewScheduler\s*\(|\basynq\.NewPeriodicTaskManager\s*\(", text):
        if not SLOTTED.search(text):
            yield "scheduler-per-process", line_at(text, match.start())


def _brokers(text: str, uses: set[str]) -> Iterator[Hit]:
    if "RabbitMQ" in uses:
        for match, call in calls(text, r"\.Consume(?:WithContext)?"):
            given = [argument for argument in arguments(call) if argument != "ctx"]
            if len(given) >= 3 and given[2] == "true":
                yield "rabbit-auto-ack", line_at(text, match.start())
    if "Kafka" in uses:
        if "GroupID" in text:
            for match in re.finditer(r"\.ReadMessage\s*\(", text):
                yield "kafka-auto-commit", line_at(text, match.start())
        for match, call in calls(text, r"\bkafka\.NewConsumer"):
            if "ConfigMap{" in call and not re.search(
                r"\"enable\.auto\.(?:commit|offset\.store)\"\s*:\s*\"?false", call
            ):
                yield "kafka-auto-commit", line_at(text, match.start())
    if first := re.search(r"\.XReadGroup\(", text):
        if not re.search(r"\.XAck\(|NoAck:\s*true", text):
            yield "stream-no-ack", line_at(text, first.start())
        if not re.search(r"\.X(?:Auto)?Claim\(", text):
            yield "stream-no-claim", line_at(text, first.start())
    if not SLOTTED.search(text):
        if "robfig/cron" in uses:
            for match in re.finditer(r"\bcron\.New\s*\(|\bgocron\.NewScheduler\s*\(", text):
                yield "scheduler-per-process", line_at(text, match.start())
        if uses:
            for match in re.finditer(r"\btime\.(?:NewTicker|Tick)\s*\([^)\n]*time\.(?:Minute|Hour)", text):
                yield "interval-loop", line_at(text, match.start())


def _transactions(text: str) -> Iterator[Hit]:
    for match, inside in calls(text, r"\.(?:Transaction|RunInTx|InTx|WithTx|WithTransaction|BeginFunc)"):
        for call in re.finditer(SENDS, inside):
            yield "publish-in-transaction", line_at(text, match.end() - 1 + call.start())
    for begun in re.finditer(r"\.(?:Begin|BeginTx|BeginTxx|Beginx)\s*\(", text):
        after = text[begun.end() :]
        # Up to the commit, within the same function.
        ended = re.search(r"\.Commit\s*\(|^\}", after, re.MULTILINE)
        for call in re.finditer(SENDS, after[: ended.start()] if ended and "Commit" in ended[0] else ""):
            yield "publish-in-transaction", line_at(text, begun.end() + call.start())


def _keys_and_calls(text: str, uses: set[str]) -> Iterator[Hit]:
    for match in re.finditer(r"Idempotency-?Key\"?\s*[,:=]\s*([^\n]*)", text, re.IGNORECASE):
        value = match[1]
        if simple := re.match(r"(\w+)\s*\)?\s*,?$", value):
            made = re.search(rf"\b{simple[1]}\s*:?=\s*([^\n]*)", text)
            value = made[1] if made else value
        if re.search(r"uuid\.New|ulid\.Make|rand\.|time\.Now", value):
            yield "key-per-try", line_at(text, match.start())
        elif re.search(r"\.TaskID\(\)|GetTaskID\(|ResultWriter\(\)", value):
            yield "job-id-as-key", line_at(text, match.start())
    for match, call in calls(text, r"\.SetNX"):
        # To the end of the function.
        around = text[match.start() : match.start() + 900].split("\n}", maxsplit=1)[0]
        if THROTTLE.search(call):
            continue
        # Read back: a value that is made once, not a marker.
        if not re.search(r"\.Eval|NewScript|\.Get\(", around):
            locks = re.search(
                r"lock|cron|leader", text[max(0, match.start() - 200) : match.start() + 200], re.IGNORECASE
            )
            yield (
                "lock-without-token" if locks and ".Del(" in around else "set-nx-idempotency",
                line_at(text, match.start()),
            )
    if not uses or "NewRequestWithContext" in text:
        return
    for match in re.finditer(
        r"\bhttp\.(?:Get|Post|PostForm|Head)\s*\(|\bhttp\.DefaultClient\.|&?http\.Client\{\s*\}", text
    ):
        yield "http-no-timeout", line_at(text, match.start())
