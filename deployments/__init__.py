"""Commands and deployments: the `tinker-flows` command line, `tinker-flows up` and the setup of a Prefect server."""
