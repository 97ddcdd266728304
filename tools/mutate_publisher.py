#!/usr/bin/env python3
"""Takes one guard at a time out of the publisher and demands that its simulations notice; as tools/mutate_sessions.py
does with the receiver, which see.

    mutate_publisher.py [--every N --part K] [SOURCE_ROOT]
"""
import sys

import mutate_sessions as harness

P, T = "src/publish/", "src/transport/"
SOURCES = harness.SOURCES + ["src/tensor/convert.c", "src/base/log.c"] + ["src/format/" + name + ".c" for name in (
    "base64", "file", "json", "json_bytes", "json_scan", "json_writer", "safetensors", "safetensors_write",
    "torch_write")] + [
    P + name + ".c" for name in ("bucket", "fleet", "gather", "ledger", "publisher", "push", "push_declare",
                                  "push_session", "push_stream", "receipt", "round")] + [
    T + name + ".c" for name in (
        "dialect", "engine_receipt", "http_client", "http_transport", "reply", "safetensors_dialect", "sglang_body",
        "sglang_dialect", "stage", "wire_bucket")]
FAKES = ["tests/sim/fake_sink.c", "tests/sim/fake_fleet.c", "tests/sim/fake_weights.c"]
ALONE, GROUP = FAKES + ["tests/sim/test_publish_sim.c"], FAKES + ["tests/sim/fake_group.c",
                                                                  "tests/sim/test_publish_group_sim.c"]
LIBRARIES = ["-lcurl", "-lcjson", "-lxxhash", "-lcrypto", "-lcmocka", "-lpthread", "-lm"]

OF_ONE = [
    # ---- what engines received ----
    (P + "push_session.c", "    if (!e->has_receipt || !r->has_xxh3)", "    if (false)"),
    (P + "push_session.c", "           memcmp(r->xxh3, run->facts.xxh3, HR_XXH3_SIZE) == 0;", "           true;"),
    (P + "push_session.c", "        HR_TRY(check_prepared(run, &run->p->fleet.engines[i], err));", "        ;"),
    (P + "push_session.c", "    if (i == r->n_adapters)\n", "    if (i > r->n_adapters)\n"),
    (P + "push_session.c", "    if (memcmp(r->adapters[i].config_digest, digest, sizeof digest) != 0)", "    if (false)"),
    (P + "push_session.c", "    if (!e->has_receipt || r->state != HR_SESSION_PUBLISHED ||", "    if (!e->has_receipt ||"),
    (P + "push_session.c", "        strcmp(r->session_id, run->session_id) != 0)", "        false)"),
    (P + "push_session.c", "    if (version != NULL && strcmp(r->weight_version, version) != 0)", "    if (false)"),
    (P + "push_session.c", "    if (e->prepared && strcmp(r->instance, e->instance) != 0)", "    if (false)"),
    (P + "push_session.c", "    if (e->prepared && (!r->has_xxh3 || !has_what_was_sent(run, r)))", "    if (false)"),
    (P + "push_session.c", "        HR_TRY(hr_push_check_committed(run, err));", "        ;"),
    (T + "wire_bucket.c", "            hr_xxh3(t->tensor->data, bytes, t->xxh3);", "            ;"),
    (T + "wire_bucket.c", "            hr_xxh3_stream_digest(b->stream, t->xxh3);", "            ;"),
    (P + "push_stream.c", "        memcpy(e->xxh3, t->xxh3, HR_XXH3_SIZE);", "        ;"),
    # ---- what may leave ----
    (P + "push_stream.c", "        if (!run->seen[i])\n", "        if (false)\n"),
    (P + "push_stream.c", "    if (run->push->sync_base && !run->base_seen)\n", "    if (false)\n"),
    (P + "bucket.c", "    if (!declared)\n", "    if (false)\n"),
    (P + "bucket.c", "    if (unit->adapter == NULL && !push->sync_base)\n", "    if (false)\n"),
    (P + "bucket.c", "    if (adapter == NULL && strchr(t->name, ':') != NULL)\n", "    if (false)\n"),
    (P + "bucket.c", "        HR_TRY(hr_wire_name_split(t->name, NULL, &parts, err));", "        (void)parts;"),
    (P + "bucket.c", "        elements * hr_dtype_size(t->dtype) != t->bytes ||", "        false ||"),
    (P + "push_declare.c", "    if (push->complete_base && !push->sync_base)\n", "    if (false)\n"),
    (P + "push_declare.c", "    if (run->push->sync_base && !t->carries_base)\n", "    if (false)\n"),
    (P + "push_declare.c", "    if (run->push->n_adapters > 0 && !t->carries_adapters)\n", "    if (false)\n"),
    # ---- buckets ----
    (P + "push_stream.c", "    return bytes > room || run->bucket.bytes > room - bytes;", "    return false;"),
    (P + "push_stream.c", "    if (one_part(run) && !same_part(run, unit))\n", "    if (false)\n"),
    (P + "push_stream.c", "    if (run->sent_whole[adapter_index(run, unit->adapter)])\n", "    if (false)\n"),
    (P + "push_stream.c", "        hr_push_outgoing_free(out);\n", ""),
    (P + "push_stream.c", "    run->leaving = 1 - run->leaving;\n", ""),
    (P + "push_stream.c", "    HR_TRY(enter_own(run, err));\n", ""),
    (P + "push.c", "    hr_unit_release(&run.pending);\n", ""),
    (P + "push_stream.c", "    run->index++;\n", ""),
    # ---- all or nothing ----
    (P + "push_session.c", "        roll_back(run);\n", "        ;\n"),
    (P + "push_session.c", "    if (status != HR_OK && run->begun && !run->committed)", "    if (status != HR_OK && run->begun)"),
    (P + "push_session.c", "    run->committed = run->facts.commit_begun = true;\n    run->p->unstoppable = true;\n",
     "    run->committed = run->facts.commit_begun = true;\n"),
    (P + "push_session.c", "    continue_engines(run, status", "    if (status == HR_OK)\n        continue_engines(run, status"),
    (P + "push_session.c", "    bool half = failed && hr_push_leaves_base(run);", "    bool half = false;"),
    # ---- what a failure says ----
    (P + "push_session.c", "    if (hr_push_leaves_base(run) && !paused)\n", "    if (false)\n"),
    (P + "push_session.c", "    if (hr_push_leaves_adapters(run))\n", "    if (false)\n"),
    (P + "push.c", "    if (!failed || (e->known && e->state == HR_SESSION_PUBLISHED))", "    if (!failed)"),
    (P + "push.c", "hr_push_leaves_base(run) || (hr_push_leaves_adapters(run) && e->touched);",
     "hr_push_leaves_base(run);"),
    (P + "push.c", "hr_push_leaves_base(run) || (hr_push_leaves_adapters(run) && e->touched);",
     "hr_push_leaves_adapters(run);"),
    (P + "push.c", " || (run->facts.commit_begun && !e->known))", ")"),
    (P + "push.c", "(hr_push_leaves_adapters(run) && e->touched);", "hr_push_leaves_adapters(run);"),
    (P + "fleet.c", "e->touched || (stage == HR_STAGE_BUCKET && !answer->untouched);", "e->touched;"),
    (P + "fleet.c", "e->touched || (stage == HR_STAGE_BUCKET && !answer->untouched);",
     "e->touched || stage == HR_STAGE_BUCKET;"),
    (P + "push.c", "    return run->moved && touched && run->push", "    return run->moved && run->push"),
    (P + "push.c", "HR_FLEET_REQUESTS_MS(run->p->fleet.timeout_ms),", "run->p->fleet.timeout_ms,"),
    (P + "fleet.c", "    case HR_ERR_BUSY:\n", "    case HR_ERR_BUSY:\n    case HR_ERR_TIMEOUT:\n"),
    (P + "push_session.c", "    else if (status == HR_ERR_SESSION)\n", "    else if (false)\n"),
    (P + "push_session.c", "    if (run->begun)\n", "    if (false)\n"),
    (P + "receipt.c", "    bool summed = r->tensors > 0;", "    bool summed = true;"),
    (P + "push_session.c", "    if (late.status == HR_OK)\n        return status;", "    return status;"),
    # ---- calls that get lost ----
    (P + "fleet.c", "        return answer->lost && run->lost < LOST_TRIES;", "        return false;"),
    (P + "fleet.c", "        return answer->lost || !is_final(answer->status);", "        return false;"),
    (P + "fleet.c", "        return answer->lost || !is_final(answer->status);", "        return true;"),
    (P + "fleet.c", "    if (answer->lost ? !run->time_left : !run->time_to_wait)\n", "    if (false)\n"),
    (P + "fleet.c", "        return answer->lost ? run->lost < LOST_TRIES : hr_fleet_is_taken(&answer->err);",
     "        return answer->lost;"),
    (P + "publisher.c", "        publisher->cancelled = true;", "        ;"),
    (P + "push.c", "    if (!atomic_compare_exchange_strong(&p->busy, &idle, true))", "    if (false)"),
]

OF_A_GROUP = [
    (P + "ledger.c", "    if (xxh3 == NULL || memcmp(entry->xxh3, xxh3, HR_XXH3_SIZE) != 0)", "    if (false)"),
    (P + "round.c", "    hr_round_put_u64(&message, (uint64_t)failure->status);", "    hr_round_put_u64(&message, 0);"),
    (P + "push_stream.c", "            run->bucket.tensors[i].send = fresh && !gathered;", "            run->bucket.tensors[i].send = !gathered;"),
    (P + "push_stream.c", "            run->bucket.tensors[i].send = fresh && !gathered;", "            run->bucket.tensors[i].send = fresh;"),
    (P + "push_stream.c", "    if (bytes == NULL || !fresh || !hr_push_leads(run))", "    if (bytes == NULL || !hr_push_leads(run))"),
    (P + "push_declare.c", "    HR_TRY(compare_declared(&d->adapters,", "    (void)(compare_declared(&d->adapters,"),
    (P + "push_declare.c", "    HR_TRY(compare_declared(&d->flags,", "    (void)(compare_declared(&d->flags,"),
    (P + "push_declare.c", "    HR_TRY(compare_declared(&d->version,", "    (void)(compare_declared(&d->version,"),
    (P + "push_declare.c", "    *skip = d.unchanged == run->facts.ranks;", "    *skip = d.unchanged > 0;"),
    (P + "push_stream.c", "    *last = run->all_done == run->facts.ranks && run->all_empty == run->facts.ranks;",
     "    *last = run->ended;"),
    (P + "push_declare.c", "        snprintf(d->run->session_id, sizeof d->run->session_id, \"%s\", session_id);", "        (void)session_id;"),
    (P + "push.c", "    run->facts.commit_begun = status == HR_OK || lost;",
     "    run->facts.commit_begun = status == HR_OK;"),
    (P + "push.c", "    return lost ? say_may_be_committed(err) : status;", "    return status;"),
    (P + "push.c", "    if (!hr_push_leads(run))\n        return say_may_be_committed(err);", "    ;"),
    (P + "push.c", "    *err = run->failure; /* of commit, which says who has committed */", "    ;"),
]


class Build(harness.Build):
    def link(self, objects, to):
        made = harness.run(self.cc + [str(o) for o in objects] + LIBRARIES + ["-o", str(to)])
        if made.returncode != 0:
            raise SystemExit(f"{to} does not link:\n{made.stdout}")
        return to


def main():
    harness.Build, harness.SOURCES = Build, SOURCES
    failed = 0
    for tests, mutations in ((ALONE, OF_ONE), (GROUP, OF_A_GROUP)):
        harness.TESTS, harness.MUTATIONS = tests, mutations
        failed += harness.main()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
