"""Names, colours and views of Paraver's traces."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from pydtnn.tracing.exports.nesting import thread_name
from pydtnn.tracing.timeline import Timeline
from pydtnn.utils.observer import Kind


class State(IntEnum):
    """States of threads, with the numbers that Paraver's own views use."""

    IDLE = 0
    RUNNING = 1
    WAITING = 8
    POSTING = 10
    INPUT = 12
    COMMUNICATION = 13


STATES = {
    State.IDLE: ("Idle", (117, 195, 255)),
    State.RUNNING: ("Running", (0, 0, 255)),
    State.WAITING: ("Waiting for messages", (235, 0, 0)),
    State.POSTING: ("Starting messages", (255, 144, 26)),
    State.INPUT: ("Waiting for the next batch", (255, 255, 170)),
    State.COMMUNICATION: ("Collective and blocking communication", (219, 147, 112)),
}
"""Name and colour (red, green, blue) of each state."""

TYPES = {
    Kind.PHASE: (91000001, "Phase"),
    Kind.FORWARD: (91000002, "Layer, forward"),
    Kind.BACKWARD: (91000003, "Layer, backward"),
    Kind.KERNEL: (91000004, "Kernel"),
    Kind.CALL: (91000005, "Call of the communicator"),
    Kind.WAIT: (91000006, "Wait for messages"),
    Kind.LOAD: (91000007, "Work of the loader"),
}
"""Number and label of the type of events of each kind of activity."""

EPOCH, STEP, BYTES, BUCKET, MEMORY = 91000011, 91000012, 91000013, 91000014, 91000015

NUMBERS = {
    EPOCH: "Epoch, plus 1",
    STEP: "Step within the epoch, plus 1",
    BYTES: "Bytes sent by a call (B)",
    BUCKET: "Bucket, plus 1",
    MEMORY: "Memory in use (B)",
}
"""Types of events whose values are numbers."""

OPTIONS = """DEFAULT_OPTIONS

LEVEL               THREAD
UNITS               NANOSEC
LOOK_BACK           100
SPEED               1
FLAG_ICONS          ENABLED
NUM_OF_STATE_COLORS 1000
YMAX_SCALE          37


DEFAULT_SEMANTIC

THREAD_FUNC          State As Is

"""

VIEW = """#ParaverCFG
ConfigFile.Version: 3.4
ConfigFile.NumWindows: 1
ConfigFile.BeginDescription
{description}
ConfigFile.EndDescription

################################################################################
< NEW DISPLAYING WINDOW {name} >
################################################################################
window_name {name}
window_type single
window_id 1
window_position_x 100
window_position_y 100
window_width 1000
window_height 300
window_comm_lines_enabled {lines}
window_flags_enabled false
window_noncolor_mode true
window_color_mode window_in_null_gradient_mode
window_logical_filtered true
window_physical_filtered false
window_comm_fromto true
window_comm_tagsize true
window_comm_typeval true
window_units Milliseconds
window_maximum_y 100.000000000000
window_minimum_y 0.000000000000
window_compute_y_max true
window_level thread
window_scale_relative 1.000000000000
window_end_time_relative 1.000000000000
window_object appl {{ 1, {{ All }} }}
window_begin_time_relative 0.000000000000
window_open true
window_drawmode draw_maximum
window_drawmode_rows draw_maximum
window_pixel_size 1
window_labels_to_draw 1
window_selected_functions {{ 14, {{ {{cpu, Active Thd}}, {{appl, Adding}}, {{task, Adding}}, \
{{thread, {function}}}, {{node, Adding}}, {{system, Adding}}, {{workload, Adding}}, \
{{from_obj, All}}, {{to_obj, All}}, {{tag_msg, All}}, {{size_msg, All}}, {{bw_msg, All}}, \
{{evt_type, {types}}}, {{evt_value, All}} }} }}
window_compose_functions {{ 9, {{ {{compose_cpu, As Is}}, {{compose_appl, As Is}}, \
{{compose_task, As Is}}, {{compose_thread, As Is}}, {{compose_node, As Is}}, \
{{compose_system, As Is}}, {{compose_workload, As Is}}, {{topcompose1, As Is}}, \
{{topcompose2, As Is}} }} }}
{filters}"""
"""A view: lines of a key and a value, as Paraver saves them."""


def names_file(values: Mapping[int, Mapping[str, int]]) -> str:
    """Return the ``.pcf`` file: names of states, types of events and their values.

    Parameters
    ----------
    values : mapping
        For each type of events, the value of each name.
    """
    lines = ["STATES", *(f"{state.value}    {name}" for state, (name, _) in STATES.items())]
    lines += ["", "", "STATES_COLOR"]
    for state, (_, color) in STATES.items():
        lines.append(f"{state.value}    {{{','.join(map(str, color))}}}")
    for code, label in TYPES.values():
        lines += ["", "", "EVENT_TYPE", f"0    {code}    {label}", "VALUES", "0      End"]
        lines += [f"{value}      {name}" for name, value in values.get(code, {}).items()]
    for code, label in NUMBERS.items():
        lines += ["", "", "EVENT_TYPE", f"0    {code}    {label}"]
    return OPTIONS + "\n".join(lines) + "\n"


def rows_file(timeline: Timeline, cpus: Mapping[tuple[int, int], int], hosts: list[str]) -> str:
    """Return the ``.row`` file: names of CPUs, hosts, ranks and threads.

    Parameters
    ----------
    timeline : Timeline
    cpus : mapping
        Number of the CPU of each (rank, thread).
    hosts : list of str
    """
    threads = [thread_name(timeline, *thread) for thread in sorted(cpus)]
    levels = {
        "CPU": [
            f"CPU of {thread_name(timeline, *one)}" for one in sorted(cpus, key=cpus.__getitem__)
        ],
        "NODE": hosts,
        "TASK": [f"rank {rank}" for rank in range(timeline.size)],
        "THREAD": threads,
    }
    blocks = [
        "\n".join([f"LEVEL {level} SIZE {len(names)}", *names]) for level, names in levels.items()
    ]
    return "\n\n".join(blocks) + "\n"


def states_view() -> str:
    """Return the ``.cfg`` file of a timeline of states, with lines for messages."""
    return VIEW.format(
        name="States",
        description="What each thread does: running, waiting, communicating. Lines are messages.",
        lines="true",
        function="State As Is",
        types="All",
        filters="",
    )


def layers_view() -> str:
    """Return the ``.cfg`` file of a timeline of layers, forward and backward."""
    types = [TYPES[Kind.FORWARD], TYPES[Kind.BACKWARD]]
    codes = " ".join(str(code) for code, _ in types)
    labels = " ".join(f'"{label}"' for _, label in types)
    return VIEW.format(
        name="Layers",
        description="The layer that each rank computes, forward or backward.",
        lines="false",
        function="Last Evt Val",
        types="=",
        filters=f"window_filter_module evt_type {len(types)} {codes}\n"
        f"window_filter_module evt_type_label {len(types)} {labels}\n",
    )
