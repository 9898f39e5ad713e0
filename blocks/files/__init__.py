"""Files: the project home, run directories on a local disk or on S3, and the locks of their writers."""
