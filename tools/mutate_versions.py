#!/usr/bin/env python3
"""Takes one rule of versions and leases at a time out of the scheduler and the adapter store, and demands that the
scheduler simulation notices. As mutate_sessions.py, but links the mutant before the libraries of a build.

    mutate_versions.py SOURCE_ROOT LIBRARY...
"""
import concurrent.futures
import os
import pathlib
import sys
import tempfile

import mutate_sessions

E = "src/engine/"
ADMIT, END, RETRACT, S = E + "schedule_admit.c", E + "schedule_end.c", E + "schedule_retract.c", E + "schedule_versions.c"
R, A = E + "request.c", "src/weights/adapter_lease.c"
TESTS = ["tests/sim/fake_model.c", "tests/sim/test_scheduler_sim.c"]
RANDOM_RUNS = "40"

# (file, piece, replacement)
MUTATIONS = [
    # ---- KV of old weights ----
    (S, "        r->cache_epoch = HR_REQUEST_OWN_KV;\n", ""),
    (S, "    if (change->base || change->flush)\n", "    if (change->flush)\n"),
    # ---- who is computed with what ----
    (S, "        renew_running(s);\n", ""),
    (S, "    for (s->n_running = 0; s->n_running < n;)\n", "    for (; s->n_running < n;)\n"),
    (S, "    s->renewed = UINT64_MAX;", ""),
    (S, "    if (r->keeps_version)\n        return;\n", ""),
    (RETRACT, "    r->keeps_version = true;\n", ""),
    (S, "        hr_request_set_adapter(r, r->lease);\n        if (hr_schedule_has", "        if (hr_schedule_has"),
    (ADMIT, "    if (hr_scheduler_is_outdated(s))\n        hr_scheduler_renew_waiting(s);\n    for", "    for"),
    (ADMIT, "        if (s->closed && !r->keeps_version)\n            continue;\n", ""),
    (S, "        n += r->keeps_version;\n", ""),
    # ---- names that are gone ----
    (S, "    if (state == HR_LEASE_UNLOADED) {", "    if (false) {"),
    (A, "? HR_LEASE_CURRENT : HR_LEASE_UNLOADED", "? HR_LEASE_UNLOADED : HR_LEASE_UNLOADED"),
    (A, "    if (state == HR_LEASE_RENEWED)\n        hr_adapter_store_release(store, &(hr_adapter_lease){version});\n", ""),
    # ---- spans ----
    (S, "(base || hr_adapter_store_is_current(s->c.store, &r->lease))", "true"),
    (S, "    note_label(s, change->base);\n", ""),
    (END, "        f->n_spans--;\n", ""),
    (R, "    bool replaces = r->n_spans > 0 && r->spans[r->n_spans - 1].start == at;", "    bool replaces = false;"),
    (R, "        r->spans[r->n_spans - 1].end = at;\n", "        r->spans[r->n_spans - 1].end = at + 1;\n"),
    (R, "    while (r->n_spans > 0)\n        drop_last_span(r, alloc);\n", ""),
]


class Build(mutate_sessions.Build):
    def __init__(self, root, folder, libraries):
        super().__init__(root, folder)
        self.flags += ["-ffp-contract=off"]
        self.libraries = libraries

    def link_with(self, mutant, to):
        objects = mutant + [self.object_of(name) for name in TESTS]
        return self.link(objects + ["-Wl,--start-group", *self.libraries, "-Wl,--end-group", "-lcjson", "-lm"], to)

    def survives(self, number, mutation):
        name, piece, replacement = mutation
        text = (self.root / name).read_text()
        if text.count(piece) != 1:
            return f"{name}: stands {text.count(piece)} times, wanted once:\n{piece}"
        source = self.folder / f"mutant{number}.c"
        source.write_text(text.replace(piece, replacement))
        program = self.link_with([self.compile(source, self.folder / f"mutant{number}.o")],
                                 self.folder / f"mutant{number}")
        return None if mutate_sessions.simulation_fails(program) else f"{name}: the simulation does not notice {piece}"


def main():
    mutate_sessions.RANDOM_RUNS, mutate_sessions.TIMEOUT_S = RANDOM_RUNS, 120
    root, libraries = pathlib.Path(sys.argv[1]).resolve(), [os.path.abspath(path) for path in sys.argv[2:]]
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        build = Build(root, pathlib.Path(folder), libraries)
        list(pool.map(lambda name: build.compile(root / name, build.object_of(name)), TESTS))
        if mutate_sessions.simulation_fails(build.link_with([], pathlib.Path(folder) / "whole")):
            print("the simulation fails without any mutation")
            return 1
        wrong = [w for w in pool.map(build.survives, range(len(MUTATIONS)), MUTATIONS) if w]
    print("\n\n".join(wrong + [f"{len(MUTATIONS) - len(wrong)} of {len(MUTATIONS)} mutants were noticed"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
