"""verify.py: the verdicts, the random trees they stand on, the command line, and the grader."""

import math
import re

import pytest
import torch

import claims
import losses
import verify
from verify import CLAIMS, Claim, Draws, Evidence, examine, main, mend


def test_every_verdict_is_the_expected_one_and_the_tables_follow(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    verdicts = {
        line.split()[0]: line for line in out.splitlines() if line[6:11] in ("HOLDS", "FAILS")
    }
    assert list(verdicts) == [claim.id for claim in CLAIMS]
    assert {id_ for id_, line in verdicts.items() if "FAILS AS STATED" in line} == {"C5b", "C14"}
    only_if = {id_ for id_, line in verdicts.items() if "HOLDS ONLY IF" in line}
    assert only_if == {"C7", "C8", "C10", "C11", "C12", "C15", "C16", "N2", "A5", "I1"}
    table = out[out.index("What is left") :].splitlines()
    end = 2 + len(claims.AUDIT)
    audit = {
        row.split()[0]: ["0" if cell == "0" else "x" for cell in row.split()[1:]]
        for row in table[2:end]
    }
    assert {name: "".join(cells) for name, cells in audit.items()} == claims.AUDIT
    assert table[end + 1].startswith("The price") and table[end + 3 + len(claims.ALL)] == ""
    titles = [line[:3] for line in table if re.match(r"[NA]\d: ", line)]
    assert titles == ["N3:", "N7:", "A3:"]


@pytest.mark.parametrize("seed", [1, 2])
def test_the_verdicts_do_not_depend_on_the_seed(seed):
    assert [
        (o.claim, o.function, o.message)
        for o in verify.verify(losses, CLAIMS, Draws(seed, 5))
        if o.message
    ] == []


def test_each_claim_says_what_it_shows_where_it_is_from_why_and_of_which_function():
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for letter, count in (("C", 17), ("N", 7), ("A", 5), ("I", 3)):
        ids = {
            claim.id.rstrip("abcdefg")
            for claim in CLAIMS
            if claim.id[0] == letter and claim.id != "AUDIT"
        }
        assert {f"{letter}{k}" for k in range(1, count + 1)} == ids
    for claim in CLAIMS:
        statement, source, why = claim.text
        assert statement.endswith(".") and len(statement) < 116, claim.id
        assert "(" in source and set(source) & set("PSD"), claim.id
        assert len(why) > 100 or "derivation: C17a" in source, claim.id
        assert bool(claim.condition) == (claim.verdict != "HOLDS"), claim.id
        assert all(hasattr(losses, function) for function in claim.functions), claim.id


def test_every_function_of_the_contract_is_spoken_of():
    spoken = {function for claim in CLAIMS for function in claim.functions}
    parts = [f for method in losses.METHODS.values() for f in (*method.passes, method.credit) if f]
    methods = {f.__name__ for f in parts}
    meter = {"token_coefficients", "prefix_nodes", "learning_tax", "project"}
    assert (
        methods | meter | {"group_advantages", "sequence_ratio", "min_replace", "adv_orthogonal"}
        <= spoken
    )
    rules = {method.credit.__name__ for method in losses.METHODS.values() if method.credit}
    assert set(claims.AUDIT) == methods - rules | {"project"}


# ---------------- what the verdicts stand on


def test_the_draws_are_as_varied_as_the_table_says():
    draws = Draws(0)[None]
    assert {2, 16} <= {d.G for d in draws} and {d.N // d.G for d in draws} == {1, 2, 3}
    assert any(len(set(d.T)) > 1 for d in draws) and any(len(set(d.T)) == 1 for d in draws)
    assert any(0 in d.adv for d in draws) and all(min(d.adv) < 0 < max(d.adv) for d in draws)
    assert any(not any(d.adv[-d.G :]) for d in draws)  # a whole group without advantages
    shared = torch.tensor([rho for d in draws for rho, _, _ in d.at_shared(0.6)])
    assert (
        min((shared > 1.28).sum(), (shared < 0.8).sum(), ((shared > 0.8) & (shared < 1.2)).sum())
        > 5
    )
    for d in draws:
        assert sum(d.adv) == pytest.approx(0, abs=1e-12) and not d.mask[:, -1].any()
        batch = d.batch(losses, 0.6)
        padding = ~d.mask
        assert (batch.logp[padding] == 1e4).all() and (batch.adv[padding] == 1e4).all()
        assert (batch.logp - batch.logp_old)[d.mask].exp().sub(
            d.log_ratio(0.6)[d.mask].exp()
        ).abs().max() < 1e-14


def test_the_tree_is_the_set_of_prefixes_and_its_ratios_belong_to_nodes():
    for d in Draws(1, 4)[None]:
        for (p, prefix), visits in d.tree.items():
            rows = [
                i for i in range(p * d.G, (p + 1) * d.G) if d.answers[i][: len(prefix)] == prefix
            ]
            assert visits == [(i, len(prefix) - 1) for i in rows]
            assert (
                len({float(d.noise[visit]) for visit in visits})
                == len({int(d.nodes[visit]) for visit in visits})
                == 1
            )


def test_node_sums_read_the_coefficients_off_the_gradient_of_the_policy():
    for d in Draws(2, 6)[None]:
        batch = d.batch(losses, 0.6)
        c = claims.coefficients(losses.grpo(batch), batch)
        by_hand = [c[list(rows), t].sum() for _, rows, t in d.at_shared()]
        torch.testing.assert_close(
            d.node_sums(losses.grpo(batch)), torch.stack(by_hand), atol=1e-14, rtol=0
        )


def test_all_groups_have_probability_one_and_average_to_the_exact_gradient_of_reinforce():
    world = Draws(0, 1)[None][0].all_groups
    for policy in (world.policy, world.old):
        assert sum(p for _, p in policy.answers(world.x)) == pytest.approx(1, abs=1e-14)
    on = losses.reinforce(world.batch(losses, off_policy=False))
    gradient = claims.ascent(on, world.policy.W)
    torch.testing.assert_close(
        gradient, world.exact * (2 / 3) / world.max_tokens, atol=1e-14, rtol=0
    )


def test_evidence_keeps_the_worst_pair_and_does_not_swallow_nan_or_shapes():
    e = Evidence()
    e.equal([1.0, 100.0], [1.0, 100.0 + 1e-9])
    assert e.error == pytest.approx(1e-11, rel=1e-3) and e.excess < 1 and math.isnan(e.remainder)
    e.equal(0, 2e-10)
    assert e.pair == (0, 2e-10) and e.excess == pytest.approx(2)
    e.equal(0, math.nan)
    assert e.error == math.inf
    with pytest.raises(ValueError, match="shape"):
        e.equal([1.0, 2.0], [1.0])
    with pytest.raises(AssertionError, match="accepted"):
        e.raises(float, "1")


def test_a_claim_fails_when_nothing_is_left_where_something_must_be():
    def check(L, name, draws, e):
        e.equal(1, 1)
        e.left(1e-12)

    outcome = examine(losses, Claim("X", check, ("grpo",), "HOLDS ONLY IF"), "grpo", [])
    assert outcome.state == "wrong"


# ---------------- the command line


def test_only_takes_ids_and_families_of_ids(capsys):
    assert main(["--only", "c5", "C17b"]) == 0
    out = capsys.readouterr().out
    assert [id_ for id_ in ("C5a", "C5b", "C17a", "C17b", "C6") if f"\n{id_} " in out] == [
        "C5a",
        "C5b",
        "C17b",
    ]


def test_explain_prints_the_derivation(capsys):
    assert main(["--explain", "C14"]) == 0
    out = capsys.readouterr().out
    assert "(.6, .3, .1)" in out and "-.3" in out and "Eq. 5" in out and len(out.splitlines()) > 8


def test_markdown_is_made_of_rectangular_tables(capsys):
    assert main(["--only", "M3", "C6", "C16", "AUDIT", "--markdown"]) == 0
    blocks = [
        block.splitlines()
        for block in capsys.readouterr().out.split("\n\n")
        if block.startswith("|")
    ]
    assert [len(block) - 2 for block in blocks] == [4, len(claims.AUDIT), len(claims.ALL)]
    for block in blocks:
        assert len({line.replace("\\|", "").count("|") for line in block}) == 1


@pytest.mark.parametrize(
    "arguments", [["--only", "C99"], ["--explain", "D1"], ["--losses", "/no/such/file.py"]]
)
def test_a_wrong_command_line_is_one_clear_line_and_exit_code_2(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and arguments[1] in captured.err


def test_every_line_of_the_table_leads_to_losses_py():
    for name in ("grpo", "project"):
        line = int(verify.where(name).split(":")[1])
        assert open(losses.__file__).read().splitlines()[line - 1].startswith(f"def {name}(")


# ---------------- the grader

STUDENT = """
import os
from losses import constant, seq_mean, clipped, group_advantages

def reinforce(batch):
    print("heard?")
    return -budget_mean(batch.adv * batch.logp, batch)

def grpo(batch, eps_low=0.2, eps_high=0.2, kl=0.0):
    while True:
        pass

def dr_grpo(batch, eps_low=0.2, eps_high=0.2):
    raise KeyError("oops")

def dapo(batch, eps_low=0.2, eps_high=0.28):
    raise NotImplementedError

def gspo(batch, eps_low=3e-4, eps_high=4e-4):
    return sum(range(10**15))

def dfpo_min(batch, ratio="geometric"):
    os._exit(3)

def dfpo_orthogonal(batch, ratio="geometric"):
    return (batch.logp

def pos_only(batch, eps_low=0.2, eps_high=0.2):
    return -seq_mean(clipped(batch, eps_low, eps_high), batch)
"""


def test_the_grader_survives_whatever_a_function_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(verify, "PATIENCE", 3)
    path = tmp_path / "student.py"
    path.write_text(STUDENT)
    assert main(["--only", "M1", "M3", "--losses", str(path)]) == 1
    out = capsys.readouterr().out
    score = {
        line.split()[0]: line for line in out[out.index("\nscore") :].splitlines() if " of " in line
    }
    assert "1 of  1" in score["reinforce"] and "heard?" not in out and "are not in this file" in out
    for function, message in {
        "grpo": "cut off after 3 s",
        "dr_grpo": "KeyError: 'oops'",
        "dapo": "not yet written",
        "gspo": "cut off after 3 s",
        "dfpo_min": "the process died",
        "dfpo_orthogonal": "SyntaxError: '(' was never closed, line 26",
        "pos_only": "expected 0, got",
    }.items():
        assert message in score[function] and "0 of  1" in score[function]
    assert "1 of 8" in score["all"]


def test_a_file_that_cannot_be_loaded_is_one_clear_line(tmp_path, capfd):
    path = tmp_path / "student.py"
    path.write_text("import no_such_module_at_all\n\ndef group_advantages(): ...\n")
    assert main(["--only", "M3", "--losses", str(path)]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and "No module named 'no_such_module_at_all'" in captured.err
    assert captured.err.count("\n") == 1


def test_a_syntax_error_is_confined_to_its_function_and_the_line_numbers_stay():
    source = "x = 1\n\n@decorator\ndef good(a):\n    return a\n\ndef bad():\ndef fine():\n    return 2\ny = 3\n"
    mended = mend(source)
    assert (
        mended.count("\n") == source.count("\n")
        and mended.splitlines()[7:] == source.splitlines()[7:]
    )
    names = {"decorator": lambda f: f}
    exec(compile(mended, "student.py", "exec"), names)
    assert names["good"](4) == 4 and names["fine"]() == 2 and names["y"] == 3
    with pytest.raises(SyntaxError, match="line 7|line 8"):
        names["bad"]()
