"""English words that are not concepts. Other languages still work, with more noise among the concepts."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What follows one of these is used as a noun.
DETERMINERS = _words(
    """
    a an the this that these those its their his her our your my each every any some no another one two
    three four five six seven eight nine ten many few several most more such both all of in into from by
    with without between through under over on onto for within across along around toward towards beneath
    below above near inside outside during against per via upon
    """
)

# What follows one of these is used as a verb.
PRONOUNS = _words(
    """
    it they we you he she i who which that to can could will would may might must shall should cannot
    does do did not also never always often usually
    """
)

COMMON = (
    DETERMINERS
    | PRONOUNS
    | _words(
        """
        about abundant after again ago almost already although am among amount and answer anyone
        anything apart are as at away back be because become becomes been before behind being best
        better beyond billion bit bright but came certain chapter clean clear close cold colder come
        comes common cool course dark day days deep deepest dense different dim directly done down dry
        early easily either else end enough entire even ever everybody everyone everything exactly
        example fact far fast faster figure first flat former found free fresh full further general get
        gets give given gives go goes going gone good great had half halves hard has have having
        heavier heavy here high higher highest him hot hour hours how however hundred if important
        indeed inner instead is itself just kept kind kinds known large larger largest last late later
        latter least left less let like likely little long longer look loose lot low lower lowest made
        main make makes making matter mean means mere million minute minutes moist moment much name
        named names nearby nearly need needs neither new next nobody none nor nothing now number
        numbers off old once only open or order other others out outer own page part partly parts
        people place places point poor possible put question quick quickly quite rare rather ready real
        really reason reasons remaining rest result results rich rigid round row safe said same say
        says second see seen set sharp short side sides simple simply since single size slow slower
        slowly small smaller smallest so soft someone something sometimes soon sort sorts step steps
        stiff still strong stronger tall taller tens than them themselves then there therefore thick
        thin thing things think third though thousand thus time times today together too true turn
        turns twice type types until up us use used useful uses using very warm warmer was way ways
        weaker well went were wet what whatever when whenever where wherever whether while whoever
        whole whose why wide word words work works year years yet
        """
    )
)

# Base forms. A text shows most of its verbs itself ("to erode", "can erode"); these it may never show so.
VERBS = _words(
    """
    absorb accept act add allow answer appear apply arrive ask become begin belong blow boil break bring
    build burn call carry catch cause change choose collect collide come connect consist contain
    contribute convert cool cover create cross decide depend describe die differ divide draw drive drop
    eat enter escape evaporate exist expand explain extend fail fall feed feel fill find finish float
    flow fly follow form freeze gather generate get give go grind grow guess happen help hide hold hope
    increase join jump keep know last lead learn leave let lie lift live lock look lose make mark matter
    meet melt mix move need obey occur offer open pass pay pick pile point prevent produce promise
    protect prove provide pull pump push raise reach read receive recognise recognize reduce reflect
    release remain remember remind remove repeat replace require rest return ride rise run scrape seem
    save send separate serve set settle shape share show sink sit sleep slide slip slow soak solve spend
    split spread stand start stay steal steer stop store stretch strike supply support surround survive
    sweep swim take tear tell tend thicken throw travel trigger try turn understand use vanish vary wait
    walk want warm wash watch wear win wish wonder worry write yield
    """
)
