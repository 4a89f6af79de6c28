import os

import pytest

from vecd.gateway.telemetry.other_programs import OtherPrograms

OURS = 77


class Proc:
    """A /proc whose processors have been busy for so many ticks."""

    def __init__(self, folder):
        self.folder = folder
        (folder / str(OURS)).mkdir()
        self.write(busy=0, ours=0)

    def write(self, *, busy, ours):
        cpus = sorted(os.sched_getaffinity(0))
        lines = ["cpu  1 2 3 4 5 6 7 8 9 10"]
        # user nice system idle iowait irq softirq steal guest guest_nice
        lines += [f"cpu{cpu} {busy if cpu == cpus[0] else 0} 0 0 999 999 0 0 0 {busy} 0" for cpu in cpus]
        lines += [f"cpu{max(cpus) + 1} 123456 0 0 0 0 0 0 0 0 0", "intr 1 2 3", "cpu0 9 9 9"]
        (self.folder / "stat").write_text("\n".join(lines))
        fields = ["0"] * 50
        fields[13], fields[14] = str(ours // 2), str(ours - ours // 2)
        (self.folder / str(OURS) / "stat").write_text(f"{OURS} (vecd (a) b) " + " ".join(fields[2:]))


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def test_what_our_own_processes_use_is_not_counted(proc):
    programs = OtherPrograms(proc.folder)
    assert programs.read(100.0, [OURS, 999_999]) == 0
    proc.write(busy=180, ours=80)
    assert programs.read(102.0, [OURS]) == pytest.approx(0.5)
    assert programs.num_cpus == len(os.sched_getaffinity(0))


def test_readings_are_a_second_apart(proc):
    programs = OtherPrograms(proc.folder)
    programs.read(100.0, [])
    proc.write(busy=100, ours=0)
    assert programs.read(100.5, []) == 0
    assert programs.read(101.0, []) == pytest.approx(1.0)


def test_a_process_that_is_new_counts_from_then_on(proc):
    programs = OtherPrograms(proc.folder)
    proc.write(busy=500, ours=500)
    programs.read(100.0, [])
    proc.write(busy=600, ours=600)
    assert programs.read(101.0, [OURS]) == pytest.approx(1.0)
    proc.write(busy=700, ours=700)
    assert programs.read(102.0, [OURS]) == 0


def test_a_kernel_that_says_nothing_leaves_the_machine_ours(tmp_path):
    assert OtherPrograms(tmp_path).read(100.0, [1]) == 0


def test_the_real_kernel_is_read():
    programs = OtherPrograms()
    programs.read(0.0, [os.getpid()])
    assert 0 <= programs.read(10.0, [os.getpid()]) <= programs.num_cpus
