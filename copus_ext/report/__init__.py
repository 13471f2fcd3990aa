"""What a run did and does, for people: reads only its directory, changes nothing."""
