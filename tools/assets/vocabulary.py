"""Word lists of the review grammar in :mod:`tools.assets.corpus`.

Polar lists come in pairs: index 0 is positive, index 1 negative. The lists are wide on purpose: a
policy trained to please the sentiment classifier must have many ways to be positive, so that it
can get there without leaving the language model's own distribution.
"""



def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines())


Pair = tuple[tuple[str, ...], tuple[str, ...]]
"""(positive words, negative words)"""

# Subjects, by what can sensibly be said of them: (singular, plural).
STORY = (
    _lines("""the film
        the movie
        the story
        the plot
        the script
        the ending
        the opening
        the first half
        the second half
        the last act
        the pacing
        the dialogue
        the humour
        the romance
        the mystery
        the finale
        the whole thing"""),
    _lines("""the jokes
        the twists
        the chase scenes
        the love scenes
        the quiet moments
        the flashbacks
        the last ten minutes"""),
)
PEOPLE = (
    _lines("""the acting
        the cast
        the lead actor
        the lead actress
        the villain
        the hero
        the narrator
        the director
        the young star
        the leading man"""),
    _lines("""the actors
        the characters
        the performances
        the two leads
        the supporting players
        the children"""),
)
CRAFT = (
    _lines("""the music
        the soundtrack
        the camera work
        the lighting
        the editing
        the animation
        the scenery
        the sound design
        the direction
        the choreography"""),
    _lines("""the songs
        the costumes
        the effects
        the visuals
        the sets
        the colours
        the stunts
        the battle scenes"""),
)

# Adjectives for anything, then for the three groups above.
ADJ_ANY: Pair = (
    _words("""wonderful superb brilliant excellent terrific marvellous fantastic great splendid
        outstanding remarkable exceptional magnificent impressive amazing perfect flawless
        memorable delightful lovely fresh inspired satisfying refreshing pleasing first-rate
        top-notch extraordinary charming"""),
    _words("""terrible awful dreadful horrible poor weak bad lousy dismal disappointing
        mediocre forgettable annoying tiresome irritating sloppy lazy stale clumsy bland
        pathetic atrocious amateurish second-rate embarrassing unbearable lifeless hopeless
        tedious"""),
)
ADJ_STORY: Pair = (
    _words("""gripping moving clever witty funny hilarious touching exciting thrilling tender
        heartfelt thoughtful engaging compelling uplifting absorbing imaginative original smart
        suspenseful inventive warm"""),
    _words("""boring dull predictable confusing pointless silly stupid shallow muddled unfunny
        hollow slow messy dreary empty ridiculous contrived incoherent endless plodding soulless
        flat"""),
)
ADJ_PEOPLE: Pair = (
    _words("""convincing natural charismatic likeable believable magnetic sincere graceful
        radiant captivating adorable confident"""),
    _words("""wooden stiff unconvincing unlikeable grating miscast robotic bored whiny
        charmless smug listless"""),
)
ADJ_CRAFT: Pair = (
    _words("""stunning beautiful gorgeous elegant vivid lush dazzling breathtaking polished
        striking enchanting glorious"""),
    _words("""ugly cheap drab garish shoddy murky harsh careless noisy crude dated
        distracting"""),
)

# Past-tense predicates that fit a singular and a plural subject alike.
PREDICATES: Pair = (
    _lines("""moved me to tears
        made me smile
        made me laugh out loud
        won me over at once
        kept me on the edge of my seat
        took my breath away
        held my attention throughout
        stayed with me for days
        brightened my week
        surprised me in the best way
        deserved every award
        worked like a charm
        exceeded all my hopes
        touched my heart
        lifted my mood
        had me hooked from the start
        earned the loud applause
        filled me with joy
        came together beautifully
        felt like a breath of fresh air"""),
    _lines("""bored me to tears
        made me cringe
        made me groan out loud
        lost me at once
        put me to sleep
        tested my patience
        wore me out
        annoyed me for days
        spoiled my week
        let me down badly
        deserved no award
        fell completely flat
        fell short of my hopes
        left me cold
        ruined my mood
        had me yawning from the start
        earned the loud boos
        filled me with regret
        fell apart quickly
        felt like a waste of time"""),
)
LIKED: Pair = (
    _words("loved adored enjoyed admired cherished savoured treasured praised"),
    _words("hated disliked loathed despised resented endured regretted mocked"),
)
REACTED: Pair = (
    _words("laughed smiled cheered grinned beamed applauded"),
    _words("yawned groaned sighed frowned squirmed grumbled"),
)
QUALITY_AMOUNT: Pair = (
    ("plenty of", "real", "so much", "a lot of", "genuine", "loads of"),
    ("no", "very little", "hardly any", "not enough", "almost no", "zero"),
)
QUALITIES = _words("""charm heart warmth wit style energy soul depth magic tension imagination
    humanity passion originality grace sparkle""")
HANDLED_WITH: Pair = (
    ("great skill", "real care", "a sure hand", "obvious love", "rare wit", "true grace",
     "quiet confidence", "much tenderness"),
    ("no skill", "little care", "a heavy hand", "obvious contempt", "forced wit", "no grace",
     "clumsy haste", "total indifference"),
)
NOTABLE: Pair = (
    _words("magical special joyful beautiful wonderful precious irresistible"),
    _words("off-putting fake joyless ugly unpleasant tired unforgivable"),
)
NOT_WORDS = ("never", "not at all", "far from", "anything but")
CLOSINGS: Pair = (
    _lines("""I would happily watch it again
        I recommend it to everyone
        Go and see it with your family
        Do not miss it
        It deserves a wide audience
        I left the cinema with a smile
        Ten out of ten
        Buy a ticket today
        It is well worth your money
        It is one of my favourites now
        I cannot praise it enough
        Everyone involved should be proud
        I already want to see it twice
        It is a treasure
        We clapped at the end
        Five stars from me"""),
    _lines("""I would never watch it again
        I recommend it to nobody
        Stay away with your family
        Do not bother
        It deserves an empty theatre
        I left the cinema with a headache
        Two out of ten
        Skip it today
        It is not worth your money
        It is one of my least favourites now
        I cannot warn you enough
        Everyone involved should be ashamed
        I already want to forget it
        It is a disaster
        We left before the end
        One star from me"""),
)

INTENSIFIERS = _words("""really truly simply quite so utterly completely consistently
    surprisingly very absolutely thoroughly""")
GENRES = _words("""comedy drama thriller romance western musical documentary fantasy sequel
    remake debut adventure""")
PERSONS = _lines("""my sister
    my brother
    my mother
    my father
    my wife
    my husband
    my daughter
    my son
    my best friend
    my neighbour
    my uncle
    my aunt
    my cousin
    my teacher
    my roommate
    my grandmother""")
CRITICS = _lines("""the audience
    the critics
    the crowd
    a friend of mine
    everybody around me
    the woman next to me
    the man behind me""")
TIMES = _lines("""last night
    last week
    on Friday
    on Sunday
    yesterday
    this morning
    on a rainy day
    over the holidays
    during the summer
    on my birthday
    after dinner
    a month ago""")
PLACES = _lines("""at the cinema
    at home
    at a festival
    on a plane
    in a small theatre
    in a packed hall
    on television
    at school
    in London
    with subtitles""")
SETTINGS = _lines("""Paris
    New York
    Rome
    a small village
    the desert
    the near future
    outer space
    a school
    the nineties
    the old west
    a quiet town
    a hospital""")
HEROES = _lines("""a lonely teacher
    a retired spy
    a young singer
    two brothers
    a tired detective
    a lost dog
    a famous chef
    three strangers
    a widow
    a clever thief
    a soldier
    an old sailor""")
DEEDS = _lines("""who must save the town
    on a long journey home
    who falls in love
    in search of the truth
    with a dark secret
    who moves to the city
    who finds a map
    after the war
    on the run
    who learns to dance""")
LEAD_INS = _lines("""honestly
    in my opinion
    for me
    to be fair
    to my surprise
    from start to finish
    as usual
    without a doubt
    in the end
    after all the talk
    after reading the book
    as a fan of the genre
    compared with the first film
    even on a small screen""")
