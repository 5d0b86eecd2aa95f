"""Schedules of groups that are several nests, each by the schedule that suits it: in launches of its own or in one."""
