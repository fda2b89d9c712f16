"""Concurrent load on OpenAI-compatible endpoints; judges a router's placement from outside.

    python bench/router_load.py --target mine=http://127.0.0.1:9000 --target other=http://127.0.0.1:9001 \\
        --worker http://127.0.0.1:8001 --worker http://127.0.0.1:8002 --flush /flush_cache \\
        --tokenize http://127.0.0.1:8001 --page 16 --rounds 3 --out result.json

A target is a router or a single server; all must stand before the same workers, or workers of the same kind.
Prompts are TEXT, sent to /v1/chat/completions as a stream with usage, temperature 0, max_tokens --output:
  burst     groups of n identical cold prompts, all at once
  fanout    one shared document, many short questions, open loop (Poisson arrivals)
  sessions  growing conversations with think times, closed loop. The assistant's turns in the history are
            scripted, so that every target gets the same work
  mixed     Zipf-hot prefixes and a share of cold unique prompts, open loop (Poisson arrivals)
Sizes: --set burst.groups=8 --set mixed.rate=20 (see SIZES; words are about tokens). Rates must fit the
workers' speed: a workload whose needed work exceeds the arrivals' span measures queues, not routing.

Each round has fresh texts for each target, so that nothing cached or remembered helps; arrivals, think times,
choices and sizes of a round are the same for all. In a round each workload runs on all targets before the
next one; every second round goes through the targets backwards. --flush PATH empties the workers' caches
before each run (POST to every --worker, else to the target).

Reported for each run (target, round, workload):
  prompt, cached   sums of usage; cached needs usage.prompt_tokens_details.cached_tokens
  computed         prompt - cached; from the workers' counters if usage does not tell
  needed           what ONE cache of unlimited size would have to compute for these prompts in this order.
                   Reuse is counted in whole pages of --page tokens (1: token-exact, a bound that no paged
                   cache reaches) and never covers a prompt's last token. Tokens come from --tokenize URL
                   (POST /tokenize with messages), or else from --dry URL: every round's prompts are sent
                   once, one after another, to that single server, which must be idle, flushable and have
                   room for a whole workload
  duplication      computed / needed: 1 is perfect; above it, placement (or too little room) made the fleet
                   work twice. A hair off 1 is normal: each further worker computes the chat template's own
                   first page, and a few generated tokens may happen to equal scripted ones
  ttft             seconds to the first text of the answer, from the PLANNED time of sending
  slowest, wall    longest request, and the whole run
  workers          requests and computed tokens of each --worker by its own counters (/metrics before and
                   after), and peak: the busiest one's share of the computed tokens
  lag              the latest that the client itself sent: if it is not small against ttft, the client was
                   the bottleneck
Summary: medians [min..max] over the rounds; ratios against the FIRST target are formed within each round. No
timing decides anything by itself, and the exit status does not depend on any. Exit status 1: a target or a
worker could not be used. Failed requests are reported, not fatal; a run with any has no duplication factor,
and its times are those of the others. A key is taken from OPENAI_API_KEY in the environment. --out FILE --add
continues FILE (more rounds, in pieces) and summarises all of it.
"""

import argparse
import asyncio
import collections
import json
import math
import os
import pathlib
import random
import re
import statistics
import sys
import time

import aiohttp

SIZES = {
    "burst": {"groups": 4, "copies": 8, "words": 500},
    "fanout": {"words": 1200, "questions": 24, "question_words": 16, "rate": 8.0},
    "sessions": {"sessions": 12, "turns": 6, "user_words": 90, "reply_words": 50, "think": 0.5},
    "mixed": {
        "requests": 40,
        "prefixes": 10,
        "prefix_words": 500,
        "zipf": 1.0,
        "tail_words": 24,
        "cold_share": 0.3,
        "cold_words": 400,
        "rate": 3.0,
    },
}
WORDS = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work government number night point
home water room mother area money story fact month lot right study book eye job word business issue
side kind head house service friend father power hour game line end member law car city name team
minute idea body back parent face level office door health person art war history party result
change morning reason research girl guy moment air teacher force education foot boy age policy music
market sense nation plan college interest death
""".split()  # noqa: SIM905
COUNTERS = {  # the first name that a worker has is taken; samples of all labels are added up
    "requests": ("vllm:request_success_total", "sglang:num_requests_total"),
    "prompt": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "cached": ("vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
}


class Unusable(Exception):
    pass


def text(words, *salt):
    rng = random.Random("/".join(map(str, salt)))
    return " ".join(rng.choices(WORDS, k=words))


def build(workload, z, seed, salt):
    """Scripts of a round: [(start in s, [(think in s, messages), ...])]. seed: the shape. salt: the texts."""
    rng = random.Random(f"{workload}/{seed}")

    def user(content):
        return {"role": "user", "content": content}

    if workload == "burst":
        groups = [user(text(z["words"], salt, "burst", g)) for g in range(z["groups"])]
        prompts = groups * z["copies"]
        rng.shuffle(prompts)  # in turn would suit, or hurt, a router that counts
        return [
            (i * 1e-4, [(0.0, [prompt])]) for i, prompt in enumerate(prompts)
        ]  # apart enough to keep this order
    if workload == "sessions":
        scripts = []
        for s in range(z["sessions"]):
            history, turns = [], []
            for t in range(z["turns"]):
                history.append(user(text(z["user_words"], salt, "user", s, t)))
                turns.append((rng.expovariate(1 / z["think"]) if t and z["think"] else 0.0, list(history)))
                history.append({"role": "assistant", "content": text(z["reply_words"], salt, "reply", s, t)})
            scripts.append((rng.uniform(0, z["think"]), turns))
        return scripts
    at, scripts = 0.0, []
    if workload == "fanout":
        document = text(z["words"], salt, "document")
        prompts = [
            f"{document}\n\n{text(z['question_words'], salt, 'question', i)}?" for i in range(z["questions"])
        ]
    else:
        weights = [1 / (rank + 1) ** z["zipf"] for rank in range(z["prefixes"])]
        prompts = []
        for i in range(z["requests"]):
            hot, cold = rng.choices(range(z["prefixes"]), weights)[0], rng.random() < z["cold_share"]
            begin, tail = text(z["prefix_words"], salt, "hot", hot), text(z["tail_words"], salt, "tail", i)
            prompts.append(text(z["cold_words"], salt, "cold", i) if cold else f"{begin}\n\n{tail}?")
    for prompt in prompts:
        scripts.append((at, [(0.0, [user(prompt)])]))
        at += rng.expovariate(z["rate"])
    return scripts


def in_order(scripts):
    """All prompts in the order in which they would be sent if answers took no time."""
    rows = []
    for start, turns in scripts:
        for think, messages in turns:
            start += think
            rows.append((start, messages))
    return [messages for _, messages in sorted(rows, key=lambda row: row[0])]


def needed_tokens(prompts, page):
    seen, total = set(), 0
    for tokens in prompts:
        chain, reused, hit = 0, 0, True
        for end in range(page, len(tokens) + 1, page):
            chain = hash((chain, tuple(tokens[end - page : end])))
            hit = hit and chain in seen and end < len(tokens)
            reused = end if hit else reused
            seen.add(chain)
        total += len(tokens) - reused
    return total


class Bench:
    def __init__(self, args, session):
        self.args, self.http, self.extra = args, session, {}

    async def post(self, url, body):
        async with self.http.post(url, json=body) as answer:
            return answer.status, await answer.text()

    async def complete(self, url, messages, planned, extra):
        """One streamed request -> {ttft, total, prompt, cached, output} or {error}; times from `planned`."""
        body = {
            "model": self.args.model,
            "messages": messages,
            "stream": True,
            "temperature": 0,
            "stream_options": {"include_usage": True},
            "max_tokens": self.args.output,
            **extra,
        }
        row = {"lag": time.perf_counter() - planned}
        usage, ended = None, False
        try:
            async with self.http.post(url + "/v1/chat/completions", json=body) as answer:
                if answer.status != 200:
                    return row | {"error": f"{answer.status} {(await answer.text())[:100]}"}
                async for line in answer.content:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        ended = True
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        return row | {"error": f"in stream: {str(event['error'])[:100]}"}
                    usage = event.get("usage") or usage
                    for choice in event.get("choices") or ():
                        delta = choice.get("delta") or {}
                        if any(map(delta.get, ("content", "reasoning_content", "reasoning"))) or choice.get(
                            "finish_reason"
                        ):
                            row.setdefault("ttft", time.perf_counter() - planned)
            if not ended or "ttft" not in row or not usage:
                return row | {
                    "error": f"incomplete stream (DONE {ended}, usage {bool(usage)}, text {'ttft' in row})"
                }
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            return row | {
                "total": time.perf_counter() - planned,
                "prompt": usage["prompt_tokens"],
                "cached": cached,
                "output": usage["completion_tokens"],
            }
        except (TimeoutError, aiohttp.ClientError, ValueError, KeyError, TypeError, AttributeError) as error:
            return row | {"error": f"{type(error).__name__}: {str(error)[:100]}"}

    async def probe(self, name, url):
        """Is the target usable, does it take ignore_eos, does it pass cached tokens on?"""
        messages = [{"role": "user", "content": text(120, self.args.salt, "probe", name)}]
        for extra in ({"ignore_eos": True}, {}):
            first = await self.complete(url, messages, time.perf_counter(), extra)
            if "error" not in first:
                break
        else:
            raise Unusable(f"target {name}: {first['error']}")
        self.extra[name] = extra
        again = [
            await self.complete(url, messages, time.perf_counter(), extra)
            for _ in range(2 * len(self.args.worker) + 1)
        ]
        cached = [row.get("cached") for row in (first, *again)]
        return {
            "ignore_eos": bool(extra),
            "usage_tells_cached": any(c is not None for c in cached),
            "cached": cached,
        }

    async def flush(self, servers):
        for server in servers if self.args.flush else ():
            for _ in range(50):  # a server may still hold a request whose client has its last byte
                status, answer = await self.post(server + self.args.flush, {})
                if status == 200:
                    break
                await asyncio.sleep(0.1)
            else:
                raise Unusable(f"{server}{self.args.flush}: {status} {answer[:100]}")

    async def counters(self):
        rows = []
        for server in self.args.worker:
            async with self.http.get(server + "/metrics") as answer:
                page, row = await answer.text(), {}
            for what, names in COUNTERS.items():
                values = next(
                    (v for n in names if (v := re.findall(rf"^{n}(?:{{.*}})? (\S+)", page, re.M))), None
                )
                row[what] = None if values is None else sum(map(float, values))
            rows.append(row)
        return rows

    async def needed(self, scripts):
        """Tokens that one unlimited cache computes for these prompts."""
        prompts = in_order(scripts)
        if self.args.tokenize:
            tokens = []
            for messages in prompts:
                body = {"model": self.args.model, "messages": messages}
                status, answer = await self.post(self.args.tokenize + "/tokenize", body)
                if status != 200:
                    raise Unusable(f"{self.args.tokenize}/tokenize: {status} {answer[:100]}")
                tokens.append(json.loads(answer)["tokens"])
            return needed_tokens(tokens, self.args.page)
        total = 0
        await self.flush([self.args.dry])
        for messages in prompts:
            row = await self.complete(self.args.dry, messages, time.perf_counter(), {})
            if row.get("cached") is None:
                raise Unusable(f"dry run: {row.get('error', 'no cached tokens in usage')}")
            total += row["prompt"] - row["cached"]
        return total

    async def run(self, name, url, workload, number):
        z = self.args.sizes[workload]
        scripts = build(workload, z, f"{self.args.seed}/{number}", f"{self.args.salt}/{number}/{name}")
        needed = await self.needed(scripts) if self.args.tokenize or self.args.dry else None
        await self.flush(self.args.worker or [url])
        await asyncio.sleep(self.args.settle)
        before, rows = await self.counters(), []
        begin = time.perf_counter() + 0.05

        async def play(start, turns):
            planned = begin + start
            for think, messages in turns:
                planned += think
                await asyncio.sleep(max(0.0, planned - time.perf_counter()))
                rows.append(await self.complete(url, messages, planned, self.extra[name]))
                planned = time.perf_counter()

        await asyncio.gather(*(play(*script) for script in scripts))
        wall = time.perf_counter() - begin
        await asyncio.sleep(0.2)
        after = await self.counters()
        moved = [
            {k: None if None in (a[k], b[k]) else b[k] - a[k] for k in a}
            for a, b in zip(before, after, strict=True)
        ]
        good = [row for row in rows if "error" not in row]
        at_workers = [
            None if m["prompt"] is None or m["cached"] is None else m["prompt"] - m["cached"] for m in moved
        ]
        told = bool(good) and all(row["cached"] is not None for row in good)
        by_workers = sum(at_workers) if at_workers and None not in at_workers else None
        computed = sum(row["prompt"] - row["cached"] for row in good) if told else by_workers
        ttft = sorted(row["ttft"] for row in good)

        def quantile(q):
            return ttft[max(0, math.ceil(q * len(ttft)) - 1)] if ttft else None  # nearest rank

        return {
            "target": name,
            "round": number,
            "workload": workload,
            "requests": len(rows),
            "errors": len(rows) - len(good),
            "error_kinds": collections.Counter(row["error"] for row in rows if "error" in row),
            "prompt": sum(row["prompt"] for row in good),
            "cached": sum(row["cached"] for row in good) if told else None,
            "computed": computed,
            "computed_by_workers": by_workers,
            "needed": needed,
            "duplication": computed / needed
            if computed is not None and needed and len(good) == len(rows)
            else None,
            "output": sum(row["output"] for row in good),
            "ttft_mean": statistics.fmean(ttft) if ttft else None,
            "ttft_p50": quantile(0.5),
            "ttft_p95": quantile(0.95),
            "ttft_max": quantile(1),
            "slowest": max((row["total"] for row in good), default=None),
            "wall": wall,
            "lag": max(row["lag"] for row in rows),
            "worker_requests": [m["requests"] for m in moved],
            "worker_computed": at_workers,
            "peak": max(at_workers) / by_workers if by_workers else None,
        }


TIMES = ("ttft_mean", "ttft_p50", "ttft_p95", "ttft_max", "slowest", "wall")
SHOWN = ("needed", "computed", "duplication", *TIMES, "peak", "errors", "lag")


def spread(values):
    values = [v for v in values if v is not None]
    return (
        {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
        if values
        else None
    )


def summarise(rows):
    out, first = {}, rows[0]["target"] if rows else None
    for workload in dict.fromkeys(row["workload"] for row in rows):
        base = {row["round"]: row for row in rows if row["workload"] == workload and row["target"] == first}
        for name in dict.fromkeys(row["target"] for row in rows):
            mine = [row for row in rows if row["workload"] == workload and row["target"] == name]
            pairs = [(row, base[row["round"]]) for row in mine if row["round"] in base]
            out.setdefault(workload, {})[name] = {m: spread(row[m] for row in mine) for m in SHOWN} | {
                "ratio": {
                    m: spread(a[m] / b[m] for a, b in pairs if a[m] is not None and b[m])
                    for m in ("computed", *TIMES)
                },
                "worker_requests": [row["worker_requests"] for row in mine],
            }
    return out


def table(summary):
    def show(s, digits=2):
        return (
            "-" if s is None else f"{s['median']:.{digits}f} [{s['min']:.{digits}f}..{s['max']:.{digits}f}]"
        )

    heads = (
        "duplication",
        "ttft mean s",
        "p95 s",
        "slowest s",
        "ratio mean",
        "ratio p95",
        "peak",
        "requests per worker",
        "errors",
    )
    lines = []
    for workload, targets in summary.items():
        lines += ["", f"| {workload} | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
        for name, t in targets.items():
            each = ", ".join(
                "/".join("?" if n is None else f"{n:.0f}" for n in counts) for counts in t["worker_requests"]
            )
            cells = (
                show(t["duplication"]),
                show(t["ttft_mean"]),
                show(t["ttft_p95"]),
                show(t["slowest"]),
                show(t["ratio"]["ttft_mean"]),
                show(t["ratio"]["ttft_p95"]),
                show(t["peak"]),
                each,
                show(t["errors"], 0),
            )
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def arguments():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def pair(value):
        return (value.split("=", 1)[0], value.split("=", 1)[1].rstrip("/"))

    def bare(value):
        return value.rstrip("/")

    p.add_argument("--target", action="append", required=True, type=pair, metavar="NAME=URL")
    p.add_argument(
        "--worker", action="append", default=[], type=bare, metavar="URL", help="an engine behind the targets"
    )
    p.add_argument("--workload", default=",".join(SIZES), help="comma-separated; default: all")
    p.add_argument("--set", action="append", default=[], metavar="WORKLOAD.KEY=NUMBER", help="change a size")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--model", help="default: the first one of the first worker's (else target's) /v1/models")
    p.add_argument("--output", type=int, default=8, help="tokens of each answer")
    p.add_argument("--flush", default="", metavar="PATH")
    p.add_argument("--tokenize", type=bare, metavar="URL")
    p.add_argument("--dry", type=bare, metavar="URL")
    p.add_argument("--page", type=int, default=1)
    p.add_argument("--settle", type=float, default=0.5, help="seconds between flush and load")
    p.add_argument("--timeout", type=float, default=120.0, help="seconds for one request")
    p.add_argument("--seed", type=int, default=1, help="shape of the rounds")
    p.add_argument("--salt", default=f"{time.time():.3f}", help="texts; default: new ones each time")
    p.add_argument("--out", type=pathlib.Path)
    p.add_argument("--add", action="store_true")
    args = p.parse_args()
    args.workloads = args.workload.split(",")
    args.sizes = {w: dict(z) for w, z in SIZES.items()}
    for change in args.set:
        found = re.fullmatch(r"(\w+)\.(\w+)=([0-9.]+)", change)
        if not found or found[2] not in args.sizes.get(found[1], {}):
            p.error(f"--set {change}: no such size")
        args.sizes[found[1]][found[2]] = type(SIZES[found[1]][found[2]])(found[3])
    if unknown := set(args.workloads) - set(SIZES):
        p.error(f"no such workload: {', '.join(sorted(unknown))}")
    if args.dry and not args.flush:
        p.error("--dry needs --flush")
    return args


def save(result, args):
    """After each run, so that what was measured is kept whatever happens next."""
    order = list(dict(args.target))  # backwards rounds must not change who is first

    def rank(row):
        return (row["round"], order.index(row["target"]) if row["target"] in order else len(order))

    result["summary"] = summarise(sorted(result["rows"], key=rank))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


async def main():
    args = arguments()
    result = {"tool": "router_load 1", "rows": [], "parts": []}
    if args.add and args.out and args.out.exists():
        result = json.loads(args.out.read_text())
    # Idle connections are given up before servers do so: a POST on a closed one would count as an error.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2)
    limits = aiohttp.ClientTimeout(total=args.timeout, sock_connect=10)
    headers = (
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
        if os.environ.get("OPENAI_API_KEY")
        else {}
    )
    async with aiohttp.ClientSession(timeout=limits, connector=connector, headers=headers) as session:
        bench = Bench(args, session)
        if not args.model:
            async with session.get((args.worker or [args.target[0][1]])[0] + "/v1/models") as answer:
                args.model = (await answer.json())["data"][0]["id"]
        probes = {name: await bench.probe(name, url) for name, url in args.target}
        result["parts"].append(
            {
                "began": time.time(),
                "probes": probes,
                "targets": dict(args.target),
                "workers": args.worker,
                "sizes": args.sizes,
                "settings": {
                    k: getattr(args, k)
                    for k in ("model", "output", "page", "seed", "salt", "flush", "settle", "tokenize", "dry")
                },
            }
        )
        for _ in range(args.rounds):
            for workload in args.workloads:
                done = [row["round"] for row in result["rows"] if row["workload"] == workload]
                number = max(done, default=-1) + 1
                for name, url in args.target if number % 2 == 0 else args.target[::-1]:
                    row = await bench.run(name, url, workload, number)
                    result["rows"].append(row)
                    save(result, args)
                    print(json.dumps(row), file=sys.stderr, flush=True)
    print(table(result["summary"]))


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except (Unusable, aiohttp.ClientError) as problem:
        sys.exit(f"router_load: {problem}")
