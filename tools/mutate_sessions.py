#!/usr/bin/env python3
"""Takes one guard at a time out of the receiver of weights and demands that the session simulation notices.

Each mutation is a piece of source that stands exactly once in its file, and what replaces it: a digest check, a lease,
a comparison of names, an order. A piece that is gone is an error (write the mutation anew); so is a mutant that the
simulation lets live. Builds in a temporary folder with $CC; only the mutated file is compiled again.

    mutate_sessions.py [--every N --part K] [SOURCE_ROOT]
"""
import argparse
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile

W = "src/weights/"
SOURCES = ["src/base/error.c", "src/base/buf.c", "src/base/clock.c", "src/base/cond.c", "src/base/cores.c",
           "src/tensor/digest.c", "src/tensor/xxh3_avx2.c", "src/tensor/dtype.c"] + [
    W + name + ".c" for name in (
        "doubt", "history", "manifest", "names", "receipt", "receiver", "receiver_control", "receiver_load", "receiver_update",
        "registry", "session", "session_build", "session_end", "stash", "turn")]
TESTS = ["tests/sim/fake_sink.c", "tests/sim/fake_trainer.c", "tests/sim/test_session_sim.c"]
RANDOM_RUNS = "20"
TIMEOUT_S = 60

# (file, piece, replacement)
MUTATIONS = [
    # ---- bytes and digests ----
    (W + "manifest.c", "if (memcmp(digest, e->xxh3, sizeof digest) != 0)", "if (false)"),
    (W + "manifest.c", "if (strcasecmp(e->sha256, wanted) != 0)", "if (false)"),
    (W + "manifest.c", "    compute_sha256(e);\n    if (e->sha256[0]", "    if (e->sha256[0]"),
    (W + "manifest.c", "        return hr_fail(err, HR_ERR_SESSION,\n                       \"[LORA-CHECK] tensor '%.200s' is in the manifest but did not come",
     "        return false ? 0 : HR_OK;\n    if (false)\n        return hr_fail(err, HR_ERR_SESSION,\n                       \"[LORA-CHECK] tensor '%.200s' is in the manifest but did not come"),
    (W + "manifest.c", "if (!sorted[i]->listed && (sorted[i]->adapter != NULL || manifest->covers_base))", "if (false)"),
    (W + "stash.c", "        e->tensor.data = to;\n", ""),
    (W + "stash.c", "        memcpy(to + at, from + at, slice);\n", "        memcpy(to + at, from, slice);\n"),
    (W + "stash.c", "        hr_xxh3_stream_update(stream, to + at, slice);\n", ""),
    (W + "stash.c", "        if (*slot != NULL) {", "        if (false) {"),
    (W + "stash.c", "            leave_first(stash, parcel, i);\n", ""),
    (W + "stash.c", "        hr_xxh3_stream_update(stream, e->xxh3, HR_XXH3_SIZE);\n", ""),
    (W + "session.c", "    if (session->audit)\n        for", "    if (false)\n        for"),
    # ---- what may come ----
    (W + "session.c", "if (e->adapter == NULL && !session->sync_base)", "if (false)"),
    (W + "session.c", "if (e->adapter != last && e->adapter != NULL &&", "if (false && e->adapter != NULL &&"),
    (W + "session.c", "    if (waiting != NULL &&\n", "    if (false &&\n"),
    (W + "session.c", "    if (bucket->index > n)\n", "    if (false)\n"),
    (W + "session.c", "    if (memcmp(identity, stream->identities[bucket->index], sizeof identity) != 0)", "    if (false)"),
    (W + "session.c", "        memcpy(stream->identities[stream->n++], session->identity, HR_XXH3_SIZE);",
     "        stream->n++;"),
    (W + "session.c", "        hr_stash_leave(stash, parcel);\n", ""),
    (W + "session.c", "    *kept = bucket->release != NULL && parcel->n_base == 0;", "    *kept = false;"),
    # ---- what must have come ----
    (W + "session_end.c", "    HR_TRY(hr_doubt_check(&session->doubt, is_proven_whole(session, options), err));", "    ;"),
    (W + "receiver_update.c", "                hr_session_note_refusal(receiver->session, bucket, cause.message);", "                ;"),
    (W + "doubt.c", "        doubt->any = false;", "        ;"),
    (W + "session_end.c", "if (r == NULL || r->tensors == 0)", "if (false)"),
    (W + "session_end.c", "    if (session->stash.n == 0)\n        return hr_fail", "    if (false)\n        return hr_fail"),
    (W + "session_end.c", "        if (r->pending)\n            return hr_fail", "        if (false)\n            return hr_fail"),
    (W + "session_end.c", "        if (r->has_previous && (", "        if (false && ("),
    (W + "session_end.c", "    r->has_previous = true;\n", ""),
    (W + "session_end.c", "        HR_TRY(check_without_manifest(session, err));", "        ;"),
    (W + "session_end.c", "        HR_TRY(hr_manifest_check(options->manifest, stash, sorted, err));", "        ;"),
    # ---- all or nothing, and nothing left ----
    (W + "session_build.c", "    return failed == NULL ? HR_OK :", "    return true ? HR_OK :"),
    (W + "session_end.c", "    HR_TRY(check_everything(session, options, sorted, err));",
     "    (void)check_everything(session, options, sorted, err);"),
    (W + "session_end.c", "        HR_TRY(sink->base_seal(sink->self, options->complete_base, err));",
     "        (void)sink->base_seal(sink->self, options->complete_base, err);"),
    (W + "session.c", "            sink->discard_adapter(sink->self, session->parts[i].built);", "            ;"),
    (W + "session.c", "        sink->base_abandon(sink->self);\n    session->base_begun = false;\n    hr_stash_destroy",
     "        ;\n    session->base_begun = false;\n    hr_stash_destroy"),
    (W + "session.c", "        if (r->pending && hr_session_admits(session, r->registration.name))\n            hr_receiving_forget",
     "        if (false)\n            hr_receiving_forget"),
    (W + "session.c", "        r->tensors = r->bytes = 0;", "        ;"),
    (W + "session_end.c", "    hr_stash_drop_bytes(&session->stash);\n    for", "    for"),
    (W + "session_end.c", "    hr_registry_end_pending(&session->shared->registry, r);\n", ""),
    (W + "session_end.c", "        .base = session->base_begun,", "        .base = false,"),
    (W + "session_end.c", "            receipts[k]->adapters[i].id = session->adapters[i].id;", "            ;"),
    (W + "session.c", "    shared->sink.forget_adapter(shared->sink.self, registered->registration.name);", "    ;"),
    (W + "stash.c", "        parcel->release(parcel->owner);", "        ;"),
    (W + "receiver_update.c", "    hr_turn_roll_back(receiver, &cause);\n    if (err != NULL)\n        *err = cause;\n    return status;\n}\n\nhr_status hr_update_publish",
     "    if (err != NULL)\n        *err = cause;\n    return status;\n}\n\nhr_status hr_update_publish"),
    (W + "receiver_update.c", "        if (!keep_prepared)\n            hr_turn_roll_back",
     "        if (false)\n            hr_turn_roll_back"),
    (W + "receiver_update.c", "        if (!keep_prepared)\n", ""),
    (W + "receiver_load.c", "        hr_update_undo(receiver, &made);", "        ;"),
    # ---- one session at a time, and the right one ----
    (W + "turn.c", "    if (session != NULL && (id == NULL || strcmp(session->id, id) == 0))", "    if (session != NULL)"),
    (W + "receiver_update.c", "    if (receiver->session != NULL)\n        return hr_turn_fail_open(receiver, err);\n    if (options->session_id != NULL) {",
     "    if (options->session_id != NULL) {"),
    (W + "receiver_control.c", "    if (receiver->session != NULL)\n        return hr_turn_fail_open(receiver, err);\n    if (strcmp(receiver->weight_version",
     "    if (strcmp(receiver->weight_version"),
    (W + "turn.c", "    if (receiver->session->state != HR_SESSION_OPEN)\n", "    if (false)\n"),
    (W + "receiver_update.c", "    if (receiver->session->state != HR_SESSION_PREPARED)\n", "    if (false)\n"),
    (W + "receiver_control.c", "    if (registered->tensors > 0)\n        return hr_fail",
     "    if (false)\n        return hr_fail"),
    (W + "receiver_control.c", "    if (registered->pending && hr_session_admits(session, name))", "    if (false)"),
    (W + "receiver_control.c", "    if (registration->defer_publish && is_published(receiver, old))", "    if (false)"),
    # ---- calls that come again ----
    (W + "receiver_update.c", "    if (is_begun_again(receiver, options))\n        return HR_OK;\n", ""),
    (W + "receiver_update.c", "session->state == HR_SESSION_OPEN &&\n           session->stash.n == 0 &&", "session->state == HR_SESSION_OPEN &&"),
    (W + "receiver_update.c", "    if (past != NULL && past->state == HR_SESSION_PUBLISHED)\n        return hr_update_copy_receipt(past->receipt, receipt, err);\n", ""),
    (W + "receiver_update.c", "    if (memcmp(now_asked, fingerprint, HR_XXH3_SIZE) != 0)", "    if (false)"),
    (W + "receiver_load.c", "    if (memcmp(identity, past->identity, sizeof identity) != 0)", "    if (false)"),
    (W + "receiver_update.c", "    hr_history_put_published(&receiver->history, session);\n", ""),
    (W + "turn.c", "    hr_history_put_rolled_back(&receiver->history, receiver->session->id, cause);\n", ""),
    # ---- leases and turns ----
    (W + "turn.c", "hr_turn_now(receiver) - receiver->last_call_ns < session->lease_ns)", "true)"),
    (W + "turn.c", "hr_turn_now(receiver) - receiver->last_call_ns < session->lease_ns)", "false)"),
    (W + "turn.c", "    receiver->last_call_ns = hr_turn_now(receiver);", "    ;"),
    (W + "turn.c", "(all || hr_turn_now(receiver) - r->since_ns >= receiver->shared.lease_ns)", "all"),
    (W + "turn.c", "(all || hr_turn_now(receiver) - r->since_ns >= receiver->shared.lease_ns)", "true"),
    (W + "turn.c", "    if (!free)\n        return false; /*", "    if (false)\n        return false; /*"),
    (W + "turn.c", "    while (receiver->turn != NULL && status == HR_OK)\n", "    while (false)\n"),
    (W + "turn.c", "    (void)roll_back_expired(receiver);\n    (void)hr_turn_forget_waiting(receiver, false);\n}", "}"),
]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


class Build:
    """Objects of the unmutated sources, and executables of mutants linked with them."""

    def __init__(self, root, folder):
        self.root, self.folder = root, folder
        self.cc = os.environ.get("CC", "cc").split()
        self.flags = ["-std=gnu17", "-O1", "-D_GNU_SOURCE", "-fno-strict-aliasing", "-w", f"-I{root}/include",
                      f"-I{root}/src", f"-I{root}/tests/sim"]

    def compile(self, source, to):
        made = run(self.cc + self.flags + ["-c", str(source), "-o", str(to)])
        if made.returncode != 0:
            raise SystemExit(f"{source} does not compile:\n{made.stdout}")
        return to

    def object_of(self, name):
        return self.folder / (name.replace("/", "_") + ".o")

    def link(self, objects, to):
        made = run(self.cc + [str(o) for o in objects] + ["-lxxhash", "-lcrypto", "-lcmocka", "-lpthread", "-o", str(to)])
        if made.returncode != 0:
            raise SystemExit(f"{to} does not link:\n{made.stdout}")
        return to

    def all_objects(self, pool):
        names = SOURCES + TESTS
        list(pool.map(lambda name: self.compile(self.root / name, self.object_of(name)), names))
        return names

    def survives(self, number, mutation):
        """None when the simulation notices, else what is wrong."""
        name, piece, replacement = mutation
        text = (self.root / name).read_text()
        if text.count(piece) != 1:
            return f"{name}: stands {text.count(piece)} times, wanted once:\n{piece}"
        source = self.folder / f"mutant{number}.c"
        source.write_text(text.replace(piece, replacement))
        mutant = self.compile(source, self.folder / f"mutant{number}.o")
        objects = [mutant if n == name else self.object_of(n) for n in SOURCES + TESTS]
        program = self.link(objects, self.folder / f"mutant{number}")
        return None if simulation_fails(program) else f"{name}: the simulation does not notice the loss of\n{piece}"


def simulation_fails(program):
    try:
        return run([str(program), RANDOM_RUNS], timeout=TIMEOUT_S).returncode != 0
    except (subprocess.TimeoutExpired, UnicodeDecodeError):
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).resolve().parent.parent, type=pathlib.Path)
    parser.add_argument("--every", type=int, default=1, help="only each N-th mutation")
    parser.add_argument("--part", type=int, default=0, help="which of them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        build = Build(args.root.resolve(), pathlib.Path(folder))
        build.all_objects(pool)
        program = build.link([build.object_of(n) for n in SOURCES + TESTS], pathlib.Path(folder) / "whole")
        if simulation_fails(program):
            print("the simulation fails without any mutation")
            return 1
        chosen = [m for i, m in enumerate(MUTATIONS) if i % args.every == args.part]
        wrong = [w for w in pool.map(build.survives, range(len(chosen)), chosen) if w]
    print("\n\n".join(wrong + [f"{len(chosen) - len(wrong)} of {len(chosen)} mutants were noticed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
