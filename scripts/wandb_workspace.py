"""Make a view of a W&B project: memory beside its plan, speed, where a step's seconds go, and the loss.

    pip install wandb-workspaces    # and `wandb login`
    python scripts/wandb_workspace.py ENTITY/PROJECT

It prints the address of the view, which is a new one each time: views that you have stay as they are.
"""

from __future__ import annotations

import argparse
import sys

import wandb_workspaces.reports.v2 as reports
import wandb_workspaces.workspaces as workspaces

from remat.config import metrics

# Of each section: the title of a panel and the metrics that it draws over each other.
SECTIONS = {
    "Memory": {
        "GPU, highest rank, GiB": [
            metrics.PLANNED_GPU_PEAK_GIB, metrics.GPU_ALLOCATED_PEAK_GIB, metrics.GPU_RESERVED_PEAK_GIB
        ],
        "Host, GiB": [metrics.HOST_RSS_PEAK_GIB, metrics.HOST_PINNED_GIB, metrics.HOST_AVAILABLE_GIB],
        "Allocations that were tried again, starts with less memory": [metrics.GPU_ALLOC_RETRIES, metrics.RETREATS],
    },
    "Speed": {
        "Tokens a second": [metrics.TOKENS_PER_S, metrics.TRAINED_TOKENS_PER_S],
        "Share of the GPU's peak FLOP/s": [metrics.MFU, metrics.HFU],
        "Seconds": [metrics.STEP_S, metrics.SAVE_S, metrics.SAVE_STALL_S],
        "Padding": [metrics.PADDING_SHARE],
    },
    "Training": {
        "Loss of a trained token": [metrics.LOSS_TRAIN, metrics.LOSS_EVAL],
        "Gradient norm before clipping": [metrics.GRAD_NORM],
        "Learning rate": [metrics.LEARNING_RATE],
        "Skipped steps": [metrics.SKIPPED_STEPS],
    },
}  # fmt: skip


def make_workspace(entity: str, project: str) -> workspaces.Workspace:
    """Return the view; nothing is sent until it is saved."""
    return workspaces.Workspace(
        name="Memory and throughput",
        entity=entity,
        project=project,
        sections=[
            workspaces.Section(
                name=section,
                is_open=True,
                panels=[
                    reports.LinePlot(title=title, x="Step", y=list(drawn)) for title, drawn in panels.items()
                ],
            )
            for section, panels in SECTIONS.items()
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("project", metavar="ENTITY/PROJECT")
    entity, slash, project = parser.parse_args().project.partition("/")
    if not (entity and slash and project):
        sys.exit(f"{entity or '/'}: write ENTITY/PROJECT, as in the address of the project on W&B")
    print(make_workspace(entity, project).save().url)


if __name__ == "__main__":
    main()
