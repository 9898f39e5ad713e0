"""Servers that a run or `tinker-flows up` starts: processes, their supervisor, logins and databases."""
