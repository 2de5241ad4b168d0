"""Words and sentence templates of the stories (world.py, eval/stories/__init__.py): data and its parser.

In a group of WORDS the early entries are drawn more often than the late ones. Adjectives, roles, traits and
animals begin with a consonant, so that "a" is always right; animals take a plural in s.
"""


def _parse_groups(text: str) -> dict[str, tuple[str, ...]]:
    """'name: a, b c' (lines that begin with a space continue the group) -> {name: ('a', 'b c')}"""
    lines = text.strip().replace("\n ", " ").splitlines()
    parts = (line.partition(":") for line in lines)
    return {name: tuple(" ".join(entry.split()) for entry in body.split(",")) for name, _, body in parts}


WORDS = _parse_groups("""
girl: Mia, Anna, Lily, Rosa, Nora, Clara, Ella, Ruth, Tess, Vera, Hana, Lena, Maya, Zoe, Ines, Greta, Dora,
 Kira, Sana, Willa, Freya, Jana, Lucia, Olive, Petra, Selma, Thea, Uma, Yara, Bella
boy: Tom, Ben, Max, Leo, Sam, Finn, Hugo, Oscar, Jack, Paul, Rafi, Milo, Otto, Karl, Nils, Omar, Pavel,
 Quinn, Theo, Victor, Walter, Yusuf, Aron, Boris, Cyrus, Dario, Emil, Felix, Goran, Jonas
adjective: red, blue, green, yellow, white, black, brown, grey, golden, silver, purple, pink, small, big,
 tiny, round, heavy, broken, shiny, dusty, wooden, painted, striped, smooth, rusty, bright, crooked, hollow,
 frozen, soft
thing: lantern, kettle, drum, key, box, boat, bell, basket, ladder, mirror, clock, cup, hat, kite, ball, book,
 lamp, rope, bottle, ring, coin, chair, blanket, candle, flute, shovel, bucket, map, wheel, brush, button,
 pillow, jar, whistle, spoon, ribbon, stone, shell, feather, hammer, teapot, trumpet, umbrella, wagon, sled,
 puppet, vase, compass, telescope, anchor
place: forest, village, river, market, garden, castle, harbor, mountain, meadow, bridge, library, mill, farm,
 beach, school, valley, lake, tower, cave, kitchen, station, island, orchard, theater, bakery, museum,
 church, square, desert, swamp
role: baker, farmer, sailor, teacher, singer, painter, doctor, gardener, fisher, tailor, miller, shepherd,
 writer, potter, hunter, builder, dancer, cook, weaver, clockmaker, librarian, messenger, carpenter, beekeeper
animal: dog, cat, rabbit, horse, goat, duck, bear, frog, hen, pig, cow, donkey, squirrel, bird, turtle,
 hedgehog, crow, beetle, tiger, badger, lamb, seal, pigeon, lizard
trait: kind, brave, quiet, clever, lazy, proud, shy, cheerful, careful, curious, patient, stubborn, gentle,
 clumsy, honest, hungry, lonely, busy, polite, famous
feeling: happy, sad, tired, angry, scared, surprised, proud, bored, calm, nervous, glad, worried, thankful,
 excited, jealous, confused
food: bread, soup, cheese, cake, honey, rice, apples, plums, cookies, carrots, beans, berries, nuts, porridge,
 pancakes, noodles, pears, butter, jam, dumplings
manner: slowly, quickly, quietly, carefully, happily, sadly, bravely, gently, loudly, proudly, suddenly,
 nervously, patiently, at once, for a while, with a smile, with great care, without a word
hobby: to sing, to swim, to read, to dance, to climb trees, to tell jokes, to count the stars, to bake,
 to draw maps, to fish, to sleep in the sun, to run, to paint, to build things, to write letters,
 to look at the clouds
spot: under the bed, behind the door, in the well, under a tree, behind the fence, in the barn, on the roof,
 under the stairs, in the cellar, behind the wall, in a hole, on the shelf, near the gate, under the bridge,
 in the tall grass, beside the road, in the attic, under the table
when: One day, In the morning, That night, After lunch, Later, The next day, Before sunset, At noon, Soon,
 A week later, In the evening, Early in the spring, On a cold day, At last, Then, After a while
weather: it began to rain, the sun came out, the wind was cold, it was very hot, snow fell, a storm came,
 the fog was thick, the moon was bright, the sky turned dark, it was a clear day, thunder rolled far away,
 the clouds went away
number: two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, twenty
reason: because it was late, because the road was long, because nobody else wanted to, because of the noise,
 because it was a holiday, because the door was open, because there was no time,
 because everyone was waiting, because the night was near, because it seemed right, as a joke,
 before anyone could speak, to please the children, without asking why
opinion: This is a wonderful place, I have never seen this before, We should go home, You are a good friend,
 I do not like this, Please be careful, It is not far, I have a plan, We need help, I am so hungry,
 Nobody will believe us, Let us try again, That was a mistake, I can hear something,
 You must not tell anyone, What a strange day, My feet are cold, Look at the sky, Somebody has been here,
 There is nothing to fear, I will wait for you, Do not forget the key, The water is deep, It was only a dream
said: said, whispered, shouted, answered, cried, replied, laughed
moral: a friend is worth more than gold, it is better to share, patience helps, small things matter,
 nobody should walk alone at night, the truth always comes out, hard work is its own reward,
 every road leads home
first: Zel, Tri, Bor, Ka, Mun, Ves, Dra, Pol, Nim, Gar, Sho, Lu, Rin, Tav, Quo, Fen
second: mor, na, dak, lin, tos, ria, bu, gard, vin, ska, po, meth, ran, del, zo, kin
""")

# Fixed associations: a model must learn them in training, because the context does not state them.
WORK = _parse_groups("""
baker: baked a loaf, lit the oven, kneaded the dough, sold warm rolls
farmer: plowed the field, fed the chickens, planted corn, cut the hay
sailor: raised the sail, dropped the net, scrubbed the deck, watched the tide
teacher: read from a thick page, wrote on the board, asked hard questions, rang for silence
singer: practiced a song, hummed a tune, sang for the crowd, bowed to the hall
painter: mixed the paint, drew a portrait, cleaned the brushes, stretched a canvas
doctor: wrapped a bandage, mixed a medicine, listened to a heart, washed both hands
gardener: watered the roses, pulled the weeds, trimmed the hedge, dug a flower bed
fisher: mended the nets, caught a trout, tied a hook, rowed against the wind
tailor: sewed a coat, cut the cloth, threaded a needle, measured a sleeve
miller: ground the grain, filled the flour sacks, fixed the mill stone, swept the floor
shepherd: counted the sheep, carried a newborn lamb, leaned on a staff, called the flock
writer: filled a page, crossed out a line, sharpened a pencil, finished a chapter
potter: shaped the clay, fired a bowl, glazed a plate, turned the disk
hunter: followed the tracks, set a trap, drew the bow, slept in a tent
builder: laid the bricks, mixed the mortar, raised a beam, hammered the nails
dancer: learned a new step, turned on one foot, bowed to the crowd, tied both shoes
cook: stirred the pot, chopped the onions, tasted the sauce, peeled the potatoes
weaver: spun the wool, worked the loom, dyed the yarn, folded the cloth
clockmaker: wound the spring, oiled the gears, set the hands, polished the glass
librarian: sorted the shelves, stamped a card, dusted the pages, found an old letter
messenger: carried a letter, knocked at the gate, saddled the horse, rode all night
carpenter: sawed a plank, built a table, sanded the wood, drove a screw
beekeeper: smoked the hive, gathered the honey, wore a veil, chased a swarm
""")
DETAIL = _parse_groups("""
forest: mushrooms grew under the oaks, branches cracked, the leaves were wet
village: smoke rose from the chimneys, children played, every window was lit
river: the water rushed past, trout jumped, a raft drifted by
market: people argued about prices, the stalls were full, a juggler threw knives
garden: the roses were in bloom, bees flew about, somebody had cut the hedge
castle: the flags were flying, a guard slept, the gates were shut
harbor: ships lay at anchor, gulls screamed, it smelled of salt
mountain: the path was steep, an eagle circled, the peak was white
meadow: the grass was high, flowers bloomed, butterflies danced
bridge: the planks were rotten, a toll was due, the stream ran below
library: nobody made a sound, the shelves reached the ceiling, pages turned
mill: the sails were turning, flour covered everything, mice ran about
farm: the cows were grazing, a tractor stood idle, eggs lay in the straw
beach: waves broke on the sand, crabs ran sideways, children dug holes
school: chalk squeaked, the pupils recited, a map hung on the wall
valley: mist lay over the fields, an echo answered, vines grew in rows
lake: the water was still, swans glided past, reeds grew along the shore
tower: the stairs went round and round, bats hung from the beams, the view was grand
cave: water dripped from above, it was pitch dark, old bones lay about
kitchen: pots boiled over, it smelled of garlic, plates were stacked high
station: a train was late, steam filled the hall, travelers slept on benches
island: palms swayed, no ship had come for years, the sand was warm
orchard: the branches were heavy with fruit, ladders leaned on trunks, wasps buzzed
theater: the curtain went up, the actors bowed, nobody clapped
bakery: the loaves were still hot, a queue had formed, sugar lay everywhere
museum: statues stared, a guide spoke softly, the paintings were ancient
church: the organ played, an old bell rang, candles burned
square: pigeons pecked at crumbs, a fountain splashed, musicians played
desert: dunes stretched far away, a camel knelt, the heat was awful
swamp: mud sucked at every boot, mosquitoes hummed, frogs croaked
""")
ACT = _parse_groups("""
dog: barked, wagged its tail, buried a bone
cat: purred, licked its paw, chased a string
rabbit: hopped away, nibbled a leaf, dug a burrow
horse: neighed, galloped past, shook its mane
goat: chewed on a boot, climbed on a rock, butted the gate
duck: quacked, swam in circles, dived for food
bear: growled, scratched its back, slept all winter
frog: croaked, leaped into the pond, caught a fly
hen: clucked, laid an egg, pecked at the grain
pig: grunted, rolled in the mud, sniffed the ground
cow: mooed, gave milk, stared over the fence
donkey: refused to move, carried a heavy load, brayed
squirrel: hid an acorn, ran up a trunk, cracked a nut
bird: built a nest, sang at dawn, spread its wings
turtle: crawled by, drew in its head, lived for a century
hedgehog: curled into a ball, showed its spines, ate a worm
crow: cawed, stole a button, sat on the scarecrow
beetle: crept under a leaf, shone like metal, fell on its back
tiger: roared, stalked through the reeds, bared its teeth
badger: left its den, shuffled past, dug a tunnel
lamb: bleated, followed its mother, jumped about
seal: balanced a ball, slid off the ice, clapped its flippers
pigeon: cooed, brought a message, ate the crumbs
lizard: lost its tail, lay on a hot wall, flicked its tongue
""")

OPENINGS = (
    "Once there was a {trait} {role} named {A} who lived near the {home}.",
    "{A} was a {trait} {role}, and {A} came from the {home}.",
    "In a house by the {home} lived {A}, a {trait} {role} who liked {hobby}.",
    "Long ago, a {role} called {A} lived near the {home}.",
    "{A} had a {pet} and loved {likes}. {A} was a {role} and lived by the {home}.",
)

# Templates of each kind of event: A acts, B is another person, `mine` is a thing that A holds, `new` a thing that A
# gets, `hidden` a thing that lies at `where`. A 2 after a slot: a second draw from the same group.
EVENTS: dict[str, tuple[str, ...]] = {
    "walk": (
        "{when} {A} walked {manner} to the {place}.",
        "{when} {A} and {B} went to the {place} {reason}.",
        "{A} took the road to the {place}, and {weather}.",
        "{A} ran to the {place} {reason}.",
    ),
    "mood": (
        "{A} was {feeling} {reason}.",
        "{B} looked {feeling}, but {A} was {feeling2}.",
        "{when} {weather}, and {A} felt {feeling}.",
        "{A} liked {hobby}, and so did the {animal}.",
        "{A} was {feeling}, so {he} sat down and ate some {food}.",
    ),
    "work": (
        "{when} {A} {own_work}.",
        "{A} {own_work} {reason}.",
        "{A} {own_work}, as a {own} must, while {B} watched {manner}.",
        "A {trait} {role} {work} {manner}.",
    ),
    "scene": (
        "At the {place} {detail}.",
        "{when} {A} came to the {place}, where {detail}.",
        "{A} and {B} talked about the {place}. {B} said that {detail} there.",
    ),
    "creature": (
        "{when} a {animal} {act}.",
        "Near the {place} a {trait} {animal} {act}, and {B} {manner} went closer.",
        "The {pet} of {A} {pet_act}.",
        "{A} called the {pet}, but it {pet_act} {manner}.",
        "{A} ate the {likes} and gave the rest to the {pet}.",
    ),
    "talk": (
        '"{opinion}," {said} {A}.',
        '"{opinion}," {said} {A} {manner}. "{opinion2}," {said2} {B}.',
        '{A} asked {B} about the {animal}. "{opinion}," {said} {B}.',
        "{A} told {B} a story about a {trait} {animal} and {number} {animal2}s.",
    ),
    "meal": (
        "They ate {food} and {food2} near the {place}.",
        "{A} made some {food} for {B}.",
        "{when} {A} bought {food} at the market and gave half to a {animal}.",
        "A {trait} {animal} stole the {food} from {A}.",
    ),
    "sight": (
        "{when} {A} saw {number} {animal}s near the {place}.",
        "There were {number} {animal}s and a {trait} {animal2} at the {place}.",
        "{when} {weather}, and a {animal} ran away {manner}.",
        'A {role} came by and {said}, "{opinion}."',
    ),
    "find": (
        "{when} {A} found a {new} {spot}.",
        "{A} looked {spot} and saw a {new} there, so {he} took it.",
        "A {role} gave {A} a {new} {reason}.",
        "{A} bought a {new} from a {trait} {role}.",
    ),
    "give": (
        "{A} gave the {mine} to {B} {reason}.",
        '"This {mine} is for you," {said} {A}. {B} took it {manner}.',
        "{B} wanted the {mine}, and {A} let {B} have it.",
    ),
    "hide": (
        "{when} {A} hid the {mine} {where}.",
        "{A} put the {mine} {where} {reason}, and told only {B}.",
        "{A} left the {mine} {where} and forgot about it.",
    ),
    "where": (
        '"Where is the {hidden}?" asked {A}. "It is {where}," {said} {B}.',
        "{A} dreamed about the {hidden} that was {where}.",
        "{B} wondered who had put the {hidden} {where}.",
    ),
    "fetch": (
        "{when} {A} looked {where} and took out the {hidden}.",
        "{A} went back {manner} and found the {hidden} {where}.",
    ),
    "recall": (
        "{A} held the {mine} {manner}.",
        "{A} remembered the house near the {home}.",
        '"Do you still have the {mine}?" asked {B}. "Yes," {said} {A}.',
        '"Who is the {own}?" asked a {animal}. "It is {A}," {said} {B}.',
        "{A} wanted to show the {mine} to the people of the {home}.",
    ),
}

ENDINGS = (
    "In the end {A} went home to the {home} and slept.",
    "From that day on, {A} and {B} were friends, and {A} knew that {moral}.",
    "{A} kept the {mine} for many years.",
    "And so the {own} learned that {moral}.",
)
