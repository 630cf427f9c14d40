"""Task-incremental: as class-incremental, and the task of a test sample is known."""

from __future__ import annotations

from everfed.streams.class_incremental import ClassIncremental


class TaskIncremental(ClassIncremental):
    """A test sample comes with its task, so that only that task's classes compete."""

    scenario = "task-incremental"
    about = "new classes in every task; the task of a test sample is known"
    task_ids = True
