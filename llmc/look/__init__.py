"""Looking into finished artifacts: the build report, differences; everything here reads and nothing runs a model."""
