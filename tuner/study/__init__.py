"""The study itself: records, planner, sampler, lease, controller."""
