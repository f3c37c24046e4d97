"""Forms of a program's text that CPU programs do not have."""

from textwrap import dedent

import pytest

from shardjax.mesh import make_mesh
from shardjax.profiling import collectives, wire_bytes
from shardjax.profiling.groups import permuted_groups, replica_groups, spanned_axes
from shardjax.profiling.hlo import count_runs, parse_program, shape_bytes

EVEN_ODD = ((0, 2, 4, 6), (1, 3, 5, 7))
PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", PAIRS),
        ("{}", (tuple(range(8)),)),
        ("[4,2]<=[8]", PAIRS),
        ("[2,4]<=[4,2]T(1,0)", EVEN_ODD),
        ("[1,8]<=[2,2,2]T(2,1,0)", ((0, 4, 2, 6, 1, 5, 3, 7),)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", PAIRS),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", EVEN_ODD),
        ("mesh['a'=8,'b'=1] {'a'}", (tuple(range(8)),)),
        ("mesh['a'=8,'b'=1] {'b'}", tuple((i,) for i in range(8))),
        ("mesh['a'=4,'b'=1,'c'=2] {'a','c'}", (tuple(range(8)),)),
        ("mesh['a'=4,'b'=2] {'b','a'}", ((0, 2, 4, 6, 1, 3, 5, 7),)),
        ("mesh[a=4,b=2] {b}", PAIRS),
        ("mesh['a'=8] {'a':(1)4}", EVEN_ODD),
        ("mesh['a'=8] {'a':(4)2}", PAIRS),
        ("mesh['a'=8] {'a':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", EVEN_ODD),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", EVEN_ODD),
    ],
)
def test_every_form_of_groups(text, groups):
    attributes = f", channel_id=1, replica_groups={text}, use_global_device_ids=true"
    assert replica_groups(attributes, 8) == groups


def test_forms_nobody_knows_are_refused():
    with pytest.raises(
        ValueError, match=r"must read .* got 'v9\[8\]'. Report the text"
    ):
        replica_groups("replica_groups=v9[8]", 8)
    with pytest.raises(
        ValueError, match=r"along the axes \('a',\) .* got \"'b'\". Report"
    ):
        replica_groups("replica_groups=mesh['a'=8] {'b'}", 8)


def test_permuted_devices_are_joined_by_their_pairs():
    ring = "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}, x=1"
    assert permuted_groups(ring, 4) == ((0, 2), (1, 3))
    assert permuted_groups("source_target_pairs={{0,1},{2,3},{1,2}}", 4) == (
        (0, 1, 2, 3),
    )
    assert permuted_groups("source_target_pairs={{0,0},{1,1}}", 4) == ((0,), (1,))
    assert permuted_groups("source_target_pairs={}", 4) == ()


def test_bytes_of_shapes():
    assert shape_bytes("f32[]") == 4
    assert shape_bytes("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}") == 2048
    assert (
        shape_bytes("(pred[3], s4[3], f8e4m3fn[5], c64[2], token[])") == 3 + 2 + 5 + 16
    )
    assert shape_bytes("f32[<=8,2]{1,0}") == 64
    assert shape_bytes("f32[0,4]") == 0


def _program(body, *, before=""):
    """The text of a program with the instructions of an entry computation."""
    return dedent(before) + "ENTRY %main () -> f32[8] {\n" + body + "\n}\n"


def _only(text, devices=8):
    (one,) = collectives(text, devices=devices)
    return one


STARTED = {
    "all-gather": ("(f32[8]{0}, f32[64]{0}) all-gather-start(%x)", 32, 256, 224),
    "all-reduce": ("f32[8]{0} all-reduce-start(%x)", 32, 32, 56),
    "reduce-scatter": (
        "((f32[8]{0}), f32[1]{0}, u32[]) reduce-scatter-start(%x)",
        32,
        4,
        28,
    ),
    "all-to-all": ("((f32[8]{0}), f32[8]{0}) all-to-all-start(%x)", 32, 32, 28),
    "ragged-all-to-all": ("f32[99]{0} ragged-all-to-all(%x, %y, %y)", 32, 396, 28),
    "collective-broadcast": ("f32[8]{0} collective-broadcast(%x)", 32, 32, 32),
}


@pytest.mark.parametrize("kind", STARTED)
def test_what_starts_and_ends_is_one_collective(kind):
    text, operand, result, sent = STARTED[kind]
    one = _only(
        _program(f"""
  %x = f32[8]{{0}} parameter(0)
  %y = f32[99]{{0}} parameter(1)
  %start = {text}, replica_groups=[1,8]<=[8], to_apply=%add
  ROOT %done = f32[8]{{0}} {kind}-done(%start)""")
    )
    assert (one.kind, one.name, one.group_size) == (kind, "start", 8)
    assert (one.operand_bytes, one.result_bytes) == (operand, result)
    assert one.bytes_sent == sent


def test_started_permutes_have_two_more_parts():
    one = _only(
        _program("""
  %x = f32[8]{0} parameter(0)
  %start = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
  ROOT %done = f32[8]{0} collective-permute-done(%start)""")  # noqa: E501
    )
    assert (one.result_bytes, one.bytes_sent, one.groups) == (32, 32, ((0, 1),))


def test_permutes_to_oneself_send_nothing():
    one = _only(
        _program("""
  %x = f32[8]{0} parameter(0)
  ROOT %p = f32[8]{0} collective-permute(%x), source_target_pairs={{0,0},{1,1}}""")
    )
    assert (one.group_size, one.bytes_sent) == (1, 0)


def test_several_arrays_add_up_without_percent_signs_and_with_inline_shapes():
    one = _only(
        _program("""
  x = f32[8]{0} parameter(0)
  y = bf16[4,2]{1,0} parameter(1)
  ROOT ag = ((f32[8]{0}, bf16[4,2]{1,0}), (f32[64]{0}, /*index=1*/bf16[32,2]{1,0})) all-gather-start(f32[8]{0} x, bf16[4,2]{1,0} y), replica_groups=[1,8]<=[8], metadata={op_name="f(body=%z, {a}" id=3}""")  # noqa: E501
    )
    assert (one.operand_bytes, one.result_bytes) == (48, 384)


def test_a_wrapped_start_counts_once():
    before = """
    %wrapped (p: f32[64]) -> f32[8] {
      %p = f32[64]{0} parameter(0)
      ROOT %rs = f32[8]{0} reduce-scatter(%p), replica_groups={}, to_apply=%add
    }
    """
    one = _only(
        _program(
            """
  %x = f32[64]{0} parameter(0)
  %start = ((f32[64]{0}), f32[8]{0}, u32[]) async-start(%x), calls=%wrapped
  ROOT %done = f32[8]{0} async-done(%start)""",
            before=before,
        )
    )
    assert (one.kind, one.times, one.bytes_sent) == ("reduce-scatter", 1, 7 * 32)


def test_a_fused_all_reduce_of_tpus_is_a_reduce_scatter():
    before = """
    %all-reduce-scatter.3 (input: bf16[64,128]) -> bf16[8,128] {
      %input = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
      %ar = bf16[64,128]{1,0:T(8,128)(2,1)} all-reduce(%input), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
      %offset = s32[] constant(0)
      ROOT %part = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} dynamic-slice(%ar, %offset, %offset), dynamic_slice_sizes={8,128}
    }
    """  # noqa: E501
    one = _only(
        _program(
            """
  %x = bf16[64,128]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %f = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3, backend_config={"debug":"a(b\\n"}""",  # noqa: E501
            before=before,
        )
    )
    assert (one.kind, one.operand_bytes, one.result_bytes) == (
        "reduce-scatter",
        64 * 128 * 2,
        8 * 128 * 2,
    )
    assert one.bytes_sent == 7 * 8 * 128 * 2


def test_a_gather_of_tpus_inside_of_other_fusions_counts_once():
    flags = {"start": "-1", "during": "2", "done": "2"}
    before = "".join(
        f"""
    %{name} (p: bf16[8]) -> bf16[64] {{
      %p = bf16[8]{{0}} parameter(0)
      ROOT %ag.{name} = bf16[64]{{0}} all-gather(%p), channel_id=17, replica_groups={{}}, backend_config={{"flag_configs":[],"async_collective_fusion_config":{{"flag_start":"{flag}","flag_end":"8"}}}}
    }}
    """  # noqa: E501
        for name, flag in flags.items()
    )
    one = _only(
        _program(
            """
  %x = bf16[8]{0} parameter(0)
  %a = bf16[64]{0} fusion(%x), kind=kCustom, calls=%start
  %b = bf16[64]{0} fusion(%x), kind=kOutput, calls=%during
  ROOT %c = bf16[64]{0} fusion(%x), kind=kCustom, calls=%done""",
            before=before,
        )
    )
    assert (one.name, one.times, one.bytes_sent) == ("ag.start", 1, 112)


def test_what_slices_send_each_other_is_cross_slice():
    one = _only(
        _program("""
  %x = f32[1024,8]{1,0:T(8,128)} parameter(0)
  %token = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="psum.7_0"}
  %send = (f32[1024,8]{1,0}, u32[], token[]) send(%x, %token), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[1024,8]{1,0}, u32[], token[]) recv(%token), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %other = (f32[1024,8]{1,0}, u32[], token[]) send(%x, %token), channel_id=3
  %sent = token[] send-done(%send), channel_id=2
  ROOT %got = (f32[1024,8]{1,0}, token[]) recv-done(%recv), channel_id=1""")  # noqa: E501
    )
    assert (one.kind, one.name, one.group_size) == ("cross-slice", "send", 2)
    assert (one.groups, one.times, one.bytes_sent) == ((), 1, 32768)
    assert wire_bytes([one]).by_kind == {"cross-slice": 32768}


def test_slices_that_nobody_names_have_no_size():
    one = _only(
        _program("""
  %x = f32[8]{0} parameter(0)
  %token = token[] after-all()
  ROOT %s = (f32[8], u32[], token[]) send(%x, %token), frontend_attributes={MegascaleRendezvousKeyName="a"}""")  # noqa: E501
    )
    assert (one.kind, one.group_size) == ("cross-slice", 0)


LOOP = """
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %one = s32[]{:T(128)} constant(1)
  %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %ar = f32[8]{0} all-reduce(%x), replica_groups={}, to_apply=%add
  %next = s32[]{:T(128)} add(%i, %one)
  ROOT %t = (s32[]{:T(128)}, f32[8]{0}) tuple(%next, %ar)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(16)
  %p = (s32[]{:T(128)}, f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT
}

ENTRY %main (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = s32[]{:T(128)} copy(%zero)
  %init = (s32[]{:T(128)}, f32[8]{0}) tuple(%start, %x)
  %while = (s32[]{:T(128)}, f32[8]{0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%while), index=1
}
"""


@pytest.mark.parametrize(
    ("old", "new", "times"),
    [
        ("", "", 16),
        ("constant(0)", "constant(4)", 12),
        (
            "%next = s32[]{:T(128)} add(%i, %one)",
            "%c = s32[] copy(%i)\n  %next = s32[] add(%c, %one)",
            16,
        ),
        ("%one = s32[]{:T(128)} constant(1)", "%one = s32[] constant(5)", 4),
        ("constant(0)", "constant(16)", None),
        ("%limit = s32[]{:T(128)} constant(16)", "%limit = s32[] fusion(%p)", None),
        ("constant(1)", "constant(-1)", None),
        ("direction=LT", "direction=NE", None),
        ("copy(%zero)", "copy(%n)", None),
        ("add(%i, %one)", "multiply(%i, %one)", None),
        ("add(%i, %one)", "add(%one, %one)", None),
        ("tuple(%start, %x)", "fusion(%start, %x)", None),
        ("compare(%i, %limit)", "compare(%limit, %i)", None),
        ("ROOT %lt = pred[]{:T(512)} compare", "%lt = pred[] compare", None),
        ("ROOT %t = (s32[]{:T(128)}, f32[8]{0})", "%t = (s32[], f32[8]{0})", None),
    ],
)
def test_a_loop_of_tpus_is_counted_from_its_counter(old, new, times):
    assert old in LOOP
    found = collectives(LOOP.replace(old, new, 1), devices=8)
    if new == "constant(16)":  # never entered
        assert found == []
    else:
        assert [one.times for one in found] == [times]


def test_conditions_run_once_more_than_bodies():
    runs = count_runs(parse_program(LOOP))
    assert runs["body"].times == 16
    assert runs["condition"].times == 17


def test_what_the_entry_does_not_reach_is_not_counted():
    assert collectives(LOOP.replace("while(%init)", "other(%init)"), devices=8) == []


def test_a_computation_called_twice_runs_twice():
    before = """
    %twice (p: f32[8]) -> f32[8] {
      %p = f32[8]{0} parameter(0)
      ROOT %ar = f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add
    }
    """
    one = _only(
        _program(
            """
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} call(%x), to_apply=%twice
  %p = pred[] parameter(1)
  ROOT %z = f32[8]{0} conditional(%p, %y, %y), true_computation=%twice, false_computation=%main2""",  # noqa: E501
            before=before,
        )
    )
    assert (one.times, one.conditional) == (2, True)


@pytest.mark.parametrize("text", ["f32[8]{0} add(%y", "(f32[8]", "f32[8]", "f32[8] 3"])
def test_text_that_breaks_off_is_refused(text):
    with pytest.raises(ValueError, match=r"must read `name = .* got '.*Give the whole"):
        collectives(_program(f"  %x = {text}"), devices=8)


def test_spanned_axes_are_those_that_change_inside_a_group():
    mesh = make_mesh("4x2")
    assert spanned_axes(PAIRS, mesh) == ("model",)
    assert spanned_axes(EVEN_ODD, mesh) == ("data",)
    assert spanned_axes(((0, 3),), mesh) == ("data", "model")
    assert spanned_axes((), mesh) == ()
