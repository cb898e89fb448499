"""What decides which drafter drafts how far: costs, acceptance, the decision, and what is kept."""
