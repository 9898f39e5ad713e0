"""What a run stores in MLflow: metrics, logged models and registered versions."""
