"""verify.py: the verdicts, the random trees they stand on, and the command line."""

import inspect
import math
import re
import sys

import pytest
import torch

import losses
import verify
from claims import CLAIMS, NOTATION, Claim, Draws, Evidence, examine
from claims.audit import AUDIT
from claims.formulas import ALL
from claims.trees import EXTREMES, LARGE_IDS, ascent, coefficients
from verify import main


def test_every_verdict_is_the_expected_one_and_the_tables_follow(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    verdicts = {}
    for line in out.splitlines():
        if line[6:11] in ("HOLDS", "FAILS"):
            verdicts[line.split()[0]] = line[6:23].strip()
    assert list(verdicts) == [claim.id for claim in CLAIMS]
    fails = {id_ for id_, verdict in verdicts.items() if verdict == "FAILS AS STATED"}
    only_if = {id_ for id_, verdict in verdicts.items() if verdict == "HOLDS ONLY IF"}
    assert fails == {"C5b", "C14"}
    assert only_if == {*"C7 C8 C10 C11 C12 C15 C16 C17h C17i C18a N2 A5 I1".split()}
    table = out[out.index("What is left") :].splitlines()
    end = 2 + len(AUDIT)
    audit = {}
    for row in table[2:end]:
        name, *cells = row.split()
        audit[name] = "".join("0" if cell == "0" else "x" for cell in cells)
    assert audit == AUDIT
    assert table[end + 1].startswith("The price") and table[end + 3 + len(ALL)] == ""
    titles = [line[:3] for line in table if re.match(r"[NA]\d: ", line)]
    assert titles == ["N3:", "N7:", "A3:"]


@pytest.mark.parametrize("seed, kinds", [(1, ()), (2, EXTREMES)])
def test_the_verdicts_do_not_depend_on_the_seed(seed, kinds):
    outcomes = verify.verify(losses, CLAIMS, Draws(seed, 5, kinds))
    assert [(o.claim, o.function, o.message) for o in outcomes if o.message] == []


def test_each_claim_says_what_it_shows_where_it_is_from_why_and_of_which_function():
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    families = {id_.rstrip("abcdefghi") for id_ in ids}
    for letter, count in (("M", 8), ("C", 18), ("N", 7), ("A", 5), ("I", 3)):
        assert {f"{letter}{k}" for k in range(1, count + 1)} <= families
    for claim in CLAIMS:
        assert "\n\nSource: " in inspect.getdoc(claim.check), claim.id
        statement, source, derivation = claim.text
        assert statement.endswith(".") and len(statement) < 116, claim.id
        assert "(" in source and set(source) & set("PSD"), claim.id
        assert len(derivation) > 150 and "theory.md" not in derivation, claim.id
        assert bool(claim.condition) == (claim.verdict != "HOLDS"), claim.id
        assert all(hasattr(losses, function) for function in claim.functions), claim.id


def test_every_function_of_the_contract_is_spoken_of():
    spoken = {function for claim in CLAIMS for function in claim.functions}
    rules = {method.credit.__name__ for method in losses.METHODS.values() if method.credit}
    passes = {loss.__name__ for method in losses.METHODS.values() for loss in method.passes}
    meter = {"token_coefficients", "prefix_nodes", "learning_tax", "project", "project_unbiased"}
    parts = {"group_advantages", "sequence_ratio", "min_replace", "adv_orthogonal"}
    assert rules | passes | meter | parts <= spoken
    assert set(AUDIT) == passes | {"project"}


# ---------------- what the verdicts stand on


def test_the_draws_are_as_varied_as_verify_says():
    draws = Draws(0, kinds=())[None]
    assert {2, 16} <= {draw.G for draw in draws}
    assert {draw.N // draw.G for draw in draws} == {1, 2, 3}
    assert {len(set(draw.T)) > 1 for draw in draws} == {True, False}
    assert all(min(draw.adv) < 0 < max(draw.adv) for draw in draws)
    assert any(0 in draw.adv for draw in draws)
    assert any(not any(draw.adv[-draw.G :]) for draw in draws)  # a whole group without advantages
    shared = torch.tensor([rho for draw in draws for rho, _, _ in draw.at_shared(0.6)])
    for part in (shared > 1.28, shared < 0.8, (shared > 0.8) & (shared < 1.2)):
        assert part.sum() > 5
    for draw in draws:
        assert sum(draw.adv) == pytest.approx(0, abs=1e-12) and not draw.mask[:, -1].any()
        batch = draw.batch(losses, 0.6)
        assert (batch.logp[~draw.mask] == 1e4).all() and (batch.adv[~draw.mask] == 1e4).all()
        ratio = (batch.logp - batch.logp_old).exp()
        gap = ratio[draw.mask] - draw.log_ratio(0.6)[draw.mask].exp()
        assert gap.abs().max() < 1e-14


def test_extreme_draws_reach_where_users_are():
    steep, wide, long = Draws(0, 0)[None]
    assert [draw.kind for draw in (steep, wide, long)] == list(EXTREMES)
    assert {*steep.tokens[steep.mask].tolist()} <= {*LARGE_IDS} and max(LARGE_IDS) == 151_999
    far, near = (steep.log_ratio(spread)[steep.mask] for spread in (0.6, 0.3))
    assert far.max().exp() > 10 and far.min().exp() < 0.1 and near.abs().max() <= 0.3
    assert wide.G == 64 and 0 < max(map(abs, wide.adv)) < 1e-5
    assert len(long.shared) > 256 and max(long.T) - min(long.T) > 1
    for draw in (steep, wide, long):
        assert sum(draw.adv) == pytest.approx(0, abs=1e-12 * draw.size)


def test_the_tree_is_the_set_of_prefixes_and_its_ratios_belong_to_nodes():
    for draw in Draws(1, 4)[None]:
        for (p, prefix), visits in draw.tree.items():
            rows = range(p * draw.G, (p + 1) * draw.G)
            visitors = [i for i in rows if draw.answers[i][: len(prefix)] == prefix]
            assert visits == [(i, len(prefix) - 1) for i in visitors]
            assert len({float(draw.noise[visit]) for visit in visits}) == 1
            assert len({int(draw.nodes[visit]) for visit in visits}) == 1


def test_node_sums_read_the_coefficients_off_the_gradient_of_the_policy():
    for draw in Draws(2, 6)[None]:
        batch = draw.batch(losses, 0.6)
        c = coefficients(losses.grpo(batch), batch)
        by_hand = torch.stack([c[list(rows), t].sum() for _, rows, t in draw.at_shared()])
        sums = draw.node_sums(losses.grpo(batch))
        torch.testing.assert_close(sums, by_hand, atol=1e-14, rtol=0)


def test_all_groups_have_probability_one_and_average_to_the_exact_gradient_of_reinforce():
    world = Draws(0, 1)[None][0].all_groups
    for policy in (world.policy, world.old):
        assert sum(p for _, p in policy.answers(world.x)) == pytest.approx(1, abs=1e-14)
    gradient = ascent(losses.reinforce(world.batch(losses, off_policy=False)), world.policy.W)
    exact = world.exact * (2 / 3) / world.max_tokens
    torch.testing.assert_close(gradient, exact, atol=1e-14, rtol=0)


def test_evidence_keeps_the_worst_pair_and_does_not_swallow_nan_or_shapes():
    evidence = Evidence()
    evidence.equal([1.0, 100.0], [1.0, 100.0 + 1e-9])
    assert evidence.error == pytest.approx(1e-11, rel=1e-3) and evidence.excess < 1
    assert math.isnan(evidence.mean_left)
    evidence.equal(0, 2e-10)
    assert evidence.pair == (0, 2e-10) and evidence.excess == pytest.approx(2)
    evidence.equal(0, math.nan)
    assert evidence.error == math.inf
    with pytest.raises(ValueError, match="shape"):
        evidence.equal([1.0, 2.0], [1.0])
    with pytest.raises(AssertionError, match="accepted"):
        evidence.raises(float, "1")


@pytest.mark.parametrize(
    "predicted, left, state",
    [(1, 1.0, "ok"), (1 + 1e-11, 1.0, "ok"), (1 + 1e-9, 1.0, "wrong"), (1, 1e-12, "wrong")],
)
def test_a_claim_needs_agreement_and_something_left_where_its_condition_is_dropped(
    predicted, left, state
):
    def check(module, name, draws, evidence):
        evidence.equal(predicted, 1)
        evidence.record_left(left)

    claim = Claim("X", check, ("grpo",), "HOLDS ONLY IF")
    assert examine(losses, claim, "grpo", []).state == state


def test_a_claims_numbers_do_not_depend_on_what_was_examined_before():
    draws = Draws(3, 2)[None]
    claim = next(claim for claim in CLAIMS if claim.id == "C1")
    first, second = (examine(losses, claim, "token_coefficients", draws) for _ in range(2))
    assert first.evidence.pair == second.evidence.pair


# ---------------- the command line


def test_only_takes_ids_and_families_of_ids(capsys):
    assert main(["--only", "c5,C17b"]) == 0
    said = capsys.readouterr().out
    assert main(["--only", "c5", "C17b"]) == 0
    assert capsys.readouterr().out == said
    lines = said.splitlines()
    assert [line.split()[0] for line in lines if line[6:11] in ("HOLDS", "FAILS")] == [
        "C5a",
        "C5b",
        "C17b",
    ]


def test_explain_prints_the_derivation(capsys):
    assert main(["--explain", "C14"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("C14  ") and "Source: DFPO Cor. 3.2, Eq. 5 (S)" in out
    assert "(.6, .3, .1)" in out and "-.3" in out and len(out.splitlines()) > 8


def test_explain_names_the_command_that_prints_the_symbols_alone(capsys):
    main(["--explain", "C14"])
    command = capsys.readouterr().out.splitlines()[-1].partition(": python verify.py ")[2]
    assert main(command.split()) == 0
    assert capsys.readouterr().out == NOTATION + "\n"


@pytest.mark.parametrize("arguments", [["--explain"], ["--explain", "all"]])
def test_explain_without_an_id_prints_the_symbols_and_every_derivation_in_order(arguments, capsys):
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert out.startswith(NOTATION) and max(map(len, out.splitlines())) <= 100
    assert re.findall(r"^([A-Z]+\d*[a-i]?)  ", out[len(NOTATION) :], re.MULTILINE) == [
        claim.id for claim in CLAIMS
    ]
    for claim in CLAIMS:
        assert claim.text[2] in out
        assert sys.modules[claim.check.__module__].__doc__.strip() in out


def test_markdown_is_made_of_rectangular_tables(capsys):
    assert main(["--only", "M3", "C6", "C16", "AUDIT", "--markdown"]) == 0
    out = capsys.readouterr().out
    blocks = [block.splitlines() for block in out.split("\n\n") if block.startswith("|")]
    assert [len(block) - 2 for block in blocks] == [4, len(AUDIT), len(ALL)]
    for block in blocks:
        assert len({line.replace("\\|", "").count("|") for line in block}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "C99"],
        ["--only", ","],
        ["--explain", "D1"],
        ["--losses", "/no/such/file.py"],
        ["--seed", "many"],
        ["--no-such-flag"],
    ],
)
def test_a_wrong_command_line_is_one_clear_line_and_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    captured = capsys.readouterr()
    assert stopped.value.code == 2 and captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert arguments[-1] in captured.err


def test_the_exercises_are_loaded_only_where_they_are_asked_for(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "exercises"]:
        monkeypatch.delitem(sys.modules, name)
    main(["--only", "M4"])
    assert "exercises.claims" not in sys.modules
    main(["--explain", "X9"])
    assert "exercises.claims" in sys.modules


def test_every_line_of_the_table_leads_to_losses_py():
    lines = open(losses.__file__).read().splitlines()
    for name in ("grpo", "project"):
        number = int(verify.locate(name).split(":")[1])
        assert lines[number - 1].startswith(f"def {name}(")
