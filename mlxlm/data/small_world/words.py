"""The words of the small world: its people, animals, things and places.

They are few, so that a model learns to tell them apart within minutes, and combine to far more than it can memorize.
"""

from __future__ import annotations

GIRLS = "Anna Clara Ella Grace Iris Kate Lily Mia Nora Olga Rosa Sara".split()
BOYS = "Adam Ben Carl David Finn Jack Leo Max Omar Paul Sam Tom".split()
NAMES = GIRLS + BOYS

TOYS = "ball kite doll drum boat train car book bell robot lamp clock".split()
COLORS = "red blue green yellow white black brown".split()
# Adjectives of things, each with its opposite.
OPPOSITES = {
    "big": "small",
    "new": "old",
    "clean": "dirty",
    "dry": "wet",
    "full": "empty",
    "heavy": "light",
    "hot": "cold",
    "long": "short",
    "open": "closed",
    "soft": "hard",
    "loud": "quiet",
    "thick": "thin",
    "wide": "narrow",
    "fast": "slow",
}
# Pairs that go with no thing: asked alone.
OTHER_OPPOSITES = {
    "up": "down",
    "day": "night",
    "yes": "no",
    "happy": "sad",
    "left": "right",
    "in": "out",
    "first": "last",
    "good": "bad",
    "early": "late",
    "near": "far",
    "always": "never",
    "inside": "outside",
    "above": "below",
    "summer": "winter",
}
THINGS = (
    "ball bag bed bell boat book box bread car clock door drum garden hat house kite lamp plate road room rope ship "
    "shoe stone street table train tree wall window"
).split()
PLACES = (
    "in the kitchen",
    "in the bedroom",
    "in the barn",
    "in the school",
    "in the garden",
    "in the park",
    "in the forest",
    "at the beach",
    "at the lake",
    "on the hill",
)
OUTDOORS = PLACES[4:]
HIDING_PLACES = (
    "under the bench",
    "under the table",
    "under the bed",
    "behind the door",
    "behind a tree",
    "behind the house",
    "in the tall grass",
    "in an old box",
)
ANIMALS = "dog cat bird duck frog rabbit horse mouse fox bear goat pig sheep owl cow".split()
PETS = "dog cat bird duck rabbit goat".split()
PET_NAMES = "Spot Fluffy Rex Lucky Buddy Coco Pip Snow".split()
SOUNDS = {
    "dog": "woof",
    "cat": "meow",
    "cow": "moo",
    "duck": "quack",
    "sheep": "baa",
    "pig": "oink",
    "horse": "neigh",
    "hen": "cluck",
    "frog": "croak",
    "bird": "tweet",
    "mouse": "squeak",
    "owl": "hoot",
    "bee": "buzz",
    "snake": "hiss",
    "lion": "roar",
}
FOODS = "bread soup cake rice cheese pie".split()
FRUITS = "apple pear plum orange lemon melon".split()
FLOWERS = "rose tulip lily".split()
RELATIVES = "mother father grandmother grandfather aunt uncle".split()

# First and last parts of compound words to spell, such as snowball and moonboat.
FIRST_PARTS = (
    "air bath bed black blue book corn day door fire fish foot gold hand light moon rain sand sea snow star story sun "
    "tea tree water wind wood"
).split()
LAST_PARTS = (
    "ball bell bird board boat box bread bug bush cake coat cup field flower fly house land man place road room shell "
    "shop song stone time wheel worm yard"
).split()
