"""The plots of the small world's stories, with places for words, and questions about them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """A story with places for words.

    In a text, `[one|two]` is a choice of wording and `{name}` a word of the cast, see `cast`.

    Attributes:
        about: What the story is about, as in "Tell me a story about ...".
        sentences: The sentences of the story.
        questions: Questions about the story, with their answers and the word that a right answer contains.
    """

    about: str
    sentences: tuple[str, ...]
    questions: tuple[tuple[str, str, str], ...]


PLOTS = (
    Plot(
        "{a}, who lost a {toy}",
        (
            "[one day|one morning|last week] {a} lost {his} {color} {toy} {place}.",
            "{he} looked [for it everywhere|everywhere], but {he} could not find it.",
            "{a} was [very sad|sad and began to cry].",
            '{b} came and said, "[I will help you|Do not cry, I will help you|Let us look together]."',
            "[they looked and looked|together they looked again|they looked for a long time].",
            "[at last|then|soon] {b} saw the {toy} {hiding}.",
            '"[here it is|look, there it is|I have found it]!" said {b}.',
            "{a} [was happy again|laughed|jumped for joy] and [thanked {b}|said thank you|gave {b} a hug].",
        ),
        (
            ("What did {a} lose?", "{a} lost {his} {color} {toy}.", "{toy}"),
            ("Who helped {a}?", "{b} helped {a}.", "{b}"),
            ("Where was the {toy}?", "It was {hiding}.", "{hiding}"),
            ("What color was the {toy}?", "It was {color}.", "{color}"),
        ),
    ),
    Plot(
        "{a} and {b}, who shared a {toy}",
        (
            "{a} and {b} were [playing|together] {place}.",
            "[there was only one {toy}|they had only one {toy}|they found a {color} {toy}].",
            "{a} wanted to have it, and {b} wanted to have it [too|as well].",
            '"[it is mine|give it to me|I want it]!" said {a}. "[no, it is mine|no, give it to me]!" said {b}.',
            "[they were both angry|they did not play any more|nobody was happy].",
            'then {b} had an idea. "[let us share it|let us play with it together|first you, then me]," said {b}.',
            "[so they shared the {toy}|so they played with the {toy} together|they took turns with the {toy}].",
            "[it was much more fun|they had a lot of fun|they laughed all day], and they [stayed|were] good friends.",
        ),
        (
            ("What did they both want?", "They both wanted the {toy}.", "{toy}"),
            ("Who had an idea?", "{b} had an idea.", "{b}"),
            ("Where were they?", "They were {place}.", "{place}"),
        ),
    ),
    Plot(
        "{a} and a hungry {pet}",
        (
            "{a} was walking [home from school|home|alone] [one evening|one day|in the rain].",
            "{hiding} {he} [saw|found] a [little|small|thin] {pet}.",
            "it was [cold and hungry|very hungry|hungry and afraid].",
            '"[poor {pet}|do not be afraid|you must be hungry]," said {a}.',
            "{he} gave it some {food}, and the {pet} [ate it all|ate everything|ate and ate].",
            "{a} [took it home|took the {pet} home|let it come home with {him}] and called it {petname}.",
            "[since then|now|from that day on] {petname} [sleeps next to {his} bed|follows {him} everywhere"
            "|waits for {him} at the door every day].",
        ),
        (
            ("What did {a} find?", "{a} found a {pet}.", "{pet}"),
            ("What did {a} give the {pet}?", "{a} gave it some {food}.", "{food}"),
            ("What is the name of the {pet}?", "The {pet} is called {petname}.", "{petname}"),
            ("Where was the {pet}?", "It was {hiding}.", "{hiding}"),
        ),
    ),
    Plot(
        "{a} and {b} in the rain",
        (
            "{a} and {b} went out to play with a {toy} {outside}.",
            "[the sun was shining|it was a warm day|the day was fine] [at first|in the morning].",
            "[then|suddenly|but soon] [dark clouds came|the sky became dark] and it began to rain.",
            '"[run|quick|come]!" [cried|said] {b}, and they ran to [a barn|an old house|a big tree].',
            "they [waited|sat there] and [told stories|sang songs|listened to the rain].",
            "[after an hour|after a while|at last] the rain stopped.",
            '"[look|oh, look], a rainbow!" said {a}.',
            "they [forgot the rain|were wet, but happy] and played with the {toy} until [dinner|the evening].",
        ),
        (
            ("What did they play with?", "They played with a {toy}.", "{toy}"),
            ("Where did they play?", "They played {outside}.", "{outside}"),
            ("Who saw the rainbow?", "{a} saw the rainbow.", "{a}"),
        ),
    ),
    Plot(
        "{a} and a gift for {b}",
        (
            "it was [the birthday of {b}|{b}'s birthday].",
            "{a} [wanted to give {him2} something nice|had an idea|thought about it all week].",
            "{he} [took wood and paint and made|worked all day and made|sat down and made] a {color} {toy}.",
            "{he} put it [into a box|in a box with a bow] and went to {b}.",
            '"[happy birthday|this is for you|happy birthday, {b}]!" said {a}.',
            "{b} opened the box and [saw the {toy}|found the {color} {toy}].",
            '"[it is beautiful|thank you, {a}|I love it]!" said {b}, and [they ate cake|they danced|{a} was proud].',
        ),
        (
            ("What did {a} make?", "{a} made a {color} {toy}.", "{toy}"),
            ("Who had a birthday?", "{b} had a birthday.", "{b}"),
            ("What color was the {toy}?", "It was {color}.", "{color}"),
        ),
    ),
    Plot(
        "{a}, who was afraid",
        (
            "{a} was afraid of [the dark|deep water|big dogs|high trees|thunder].",
            "[one night|one day] {he} was {place} and [could not move|began to cry|closed {his} eyes].",
            "{b} saw {him} and [took {his} hand|sat down next to {him}].",
            '"[everybody is afraid sometimes|I was afraid once, too|we can do it together]," said {b}.',
            "[slowly|step by step|little by little] {a} [became calm|opened {his} eyes|was less afraid].",
            '"[I did it|it is not so bad|now I am not afraid any more]!" said {a}.',
            "{b} [laughed|smiled], and {a} [was proud|felt very brave].",
        ),
        (
            ("Who was afraid?", "{a} was afraid.", "{a}"),
            ("Who helped {a}?", "{b} helped {a}.", "{b}"),
            ("Where was {a}?", "{a} was {place}.", "{place}"),
        ),
    ),
    Plot(
        "{a}, who made {food}",
        (
            "{a} wanted to make {food} for {his} {relative}.",
            "[{he} went to the kitchen|{he} washed {his} hands|{he} put on a hat like a cook].",
            "[but something was missing|but {he} had no salt|but there was no butter].",
            "so {he} went to {b} [and asked for it|and asked for help|who lives next door].",
            '"[of course|with pleasure|yes, come in]," said {b}, and they made the {food} together.',
            "[it smelled wonderful|the whole house smelled good|it took an hour].",
            "the {relative} [ate it all|asked for more|said it was the best {food} in the world].",
        ),
        (
            ("What did {a} make?", "{a} made {food}.", "{food}"),
            ("Who was it for?", "It was for {his} {relative}.", "{relative}"),
            ("Who helped {a}?", "{b} helped {a}.", "{b}"),
        ),
    ),
    Plot(
        "{a}, who broke a {toy}",
        (
            "{b} had a {color} {toy} that {he2} loved.",
            "[one day|once] {a} played with it and [dropped it|fell on it]. It broke.",
            "{a} [was afraid|did not know what to do] and hid the {toy} {hiding}.",
            "but {he} [could not sleep|felt bad all day], so {he} went to {b} and told {him2} everything.",
            '"[I am sorry|I am so sorry]," said {a}.',
            '{b} was sad at first. Then {he2} said, "[thank you for telling me|I am glad that you told me]."',
            "[they fixed the {toy} together|together they fixed it], and it was [as good as new|almost like new].",
        ),
        (
            ("What did {a} break?", "{a} broke the {toy}.", "{toy}"),
            ("Whose {toy} was it?", "It was the {toy} of {b}.", "{b}"),
            ("Where did {a} hide it?", "{a} hid it {hiding}.", "{hiding}"),
        ),
    ),
    Plot(
        "{a} and {his} seed",
        (
            "{relative_of_a} gave {a} a [small|tiny|little] seed.",
            "{a} put it in the ground {outside}.",
            "every day {he} [gave it water|brought it water|watered it] and [sang to it|waited|talked to it].",
            "[for a long time nothing happened|nothing happened for days|many days went by].",
            '"[be patient|wait a little|good things take time]," said {b}.',
            "[then one morning|one day at last] there was a [beautiful|lovely|big] {color} {flower}.",
            "{a} [ran to {b} and showed it to {him2}|was so happy that {he} danced|called {b}, and they both smiled].",
        ),
        (
            ("What grew from the seed?", "A {color} {flower} grew from it.", "{flower}"),
            ("What color was the {flower}?", "It was {color}.", "{color}"),
            ("Who told {a} to wait?", "{b} told {a} to wait.", "{b}"),
        ),
    ),
    Plot(
        "{a} and {b}, who played hide and seek",
        (
            "{a} and {b} played hide and seek {place}.",
            "{a} [closed {his} eyes|turned around] and counted to ten.",
            "{b} hid {hiding} and [did not make a sound|kept very still].",
            "{a} looked [everywhere|here and there], but {he} did not find {him2}.",
            "then [the {pet} of {b}|a {pet}] [came and stopped|ran past and stopped] {hiding}.",
            '"[there you are|now I see you|found you]!" [cried|said] {a}.',
            '"[that is not fair|oh no, the {pet}]!" said {b}, and they [both laughed|laughed and played again].',
        ),
        (
            ("Who hid?", "{b} hid.", "{b}"),
            ("Where did {b} hide?", "{b} hid {hiding}.", "{hiding}"),
            ("Which animal came?", "A {pet} came.", "{pet}"),
        ),
    ),
    Plot(
        "{b}, who was new at school",
        (
            "{b} was new at school and [knew nobody|had no friends yet].",
            "{he2} sat alone {place} [and was sad|and looked at the floor].",
            "{a} saw {him2} and [went over|came closer].",
            '"[hello|hi], I am {a}. [do you want to play|will you play with me]?" said {a}.',
            '"[yes, I would like that|yes, please|yes]," said {b}.',
            "they played with {a}'s {toy} [until the bell rang|all afternoon|for an hour].",
            "[after that|from then on|since then] {b} was [never alone|not sad any more].",
        ),
        (
            ("Who was new at school?", "{b} was new at school.", "{b}"),
            ("What did they play with?", "They played with a {toy}.", "{toy}"),
            ("Who said hello?", "{a} said hello.", "{a}"),
        ),
    ),
    Plot(
        "{a} and a noise in the night",
        (
            "[it was late|it was night], and {a} could not sleep.",
            "[there was a noise|{he} heard a noise|something made a noise] {hiding}.",
            '"[what is that|who is there]?" [thought|asked] {a}.',
            "{he} [took a lamp|got up] and went to {his} {relative}.",
            "together they [went to look|looked]. It was [only|just] a {animal}!",
            "the {animal} [looked at them and ran away|wanted some {fruit}|was more afraid than they were].",
            "{a} laughed, [went back to bed|lay down again], and [slept well|slept until morning].",
        ),
        (
            ("What made the noise?", "A {animal} made the noise.", "{animal}"),
            ("Who went with {a}?", "{his} {relative} went with {him}.", "{relative}"),
            ("Where was the noise?", "It was {hiding}.", "{hiding}"),
        ),
    ),
    Plot(
        "a {animal} and a {animal2}",
        (
            "[once upon a time|once|long ago] a {animal} and a {animal2} lived {outside}.",
            "the {animal} was [strong|big|fast], and the {animal2} was [clever|small but clever|slow but clever].",
            "[one day|one winter|one summer] the {animal} [fell into a hole|was caught in a net|found no food].",
            '"[help|help me, please]!" [cried|called] the {animal}.',
            "the {animal2} [heard it|came at once] and [worked all night to help|did everything to help].",
            "[in the morning|soon] the {animal} was [free|safe] again.",
            '"[now I know who my friend is|thank you, my friend|I will never forget this]," said the {animal}.',
            "[and they shared their {fruit}s every day|they lived together happily|and they stayed friends forever].",
        ),
        (
            ("Who needed help?", "The {animal} needed help.", "{animal}"),
            ("Who helped?", "The {animal2} helped.", "{animal2}"),
            ("Where did they live?", "They lived {outside}.", "{outside}"),
        ),
    ),
    Plot(
        "{a}, who helped {his} {relative}",
        (
            "{a} met {his} {relative} {outside}.",
            "{his} {relative} [carried a heavy bag|had a heavy basket] full of {fruit}s and was [tired|very tired].",
            '"[let me carry it|may I help you|I can carry that]," said {a}.',
            "[the way was long|it was a long way|it was heavy], but {a} did not [stop|complain].",
            "at home {his} {relative} made [a pie|tea|juice] for {him}.",
            '"[you are so kind|what would I do without you|you are a great help], {a}," said {his} {relative}.',
            "{a} smiled and [ate three {fruit}s with {b}|shared a sweet {fruit} with {b}|gave {b} a {fruit}, too].",
        ),
        (
            ("Who did {a} help?", "{a} helped {his} {relative}.", "{relative}"),
            ("What was in it?", "It was full of {fruit}s.", "{fruit}"),
            ("Where did they meet?", "They met {outside}.", "{outside}"),
        ),
    ),
    Plot(
        "{a}, {b} and a boat",
        (
            "{a} made a [little|small] boat of [paper|wood] and painted it {color}.",
            "{he} put it in the water, and it [sailed|floated] away.",
            '"[stop|come back]!" [called|cried] {a}, but the boat [went on|did not stop].',
            "{b} was [fishing|sitting] by the water, far from there, with {his2} {pet}.",
            "the {pet} jumped in and [brought the boat back|caught the boat].",
            "{b} [went to look for its owner|walked up the river] and [met|found] {a}.",
            '"[is this your boat|did you lose a boat]?" asked {b}. [they built a second one|they became friends].',
        ),
        (
            ("What did {a} make?", "{a} made a boat.", "boat"),
            ("What color was the boat?", "It was {color}.", "{color}"),
            ("Who caught the boat?", "The {pet} of {b} caught it.", "{pet}"),
        ),
    ),
    Plot(
        "{a} and {b} in the snow",
        (
            "[in the morning everything was white|it had snowed all night].",
            "{a} and {b} [ran outside|put on warm coats and ran out] and built a snowman {outside}.",
            "they took a {fruit} for the nose and two stones for the eyes.",
            "{a} gave it {his} {color} hat.",
            "[in the night|the next day] the wind [took the hat away|blew, and the hat was gone].",
            "[they looked for it|they searched] and found it {hiding}. A {pet} [was asleep in it|slept in it]!",
            '"[it can keep the hat|now it is a warm bed]," said {b}, and they [laughed|smiled].',
        ),
        (
            ("What did they build?", "They built a snowman.", "snowman"),
            ("What color was the hat?", "It was {color}.", "{color}"),
            ("Where was the hat?", "It was {hiding}.", "{hiding}"),
            ("Who slept in the hat?", "A {pet} slept in it.", "{pet}"),
        ),
    ),
)
