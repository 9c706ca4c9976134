"""What a run on GPU nodes would be: placements, command lines, links, GPU-hours. Starts nothing."""
