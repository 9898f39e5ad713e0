"""MLflow run of a flow, with its data and prompts."""
