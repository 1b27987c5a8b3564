"""What the tests ask the service for."""

URL = "/{@ job if kind != 'event-driven' else plural @}"
BODY = {
{@% for column in columns %@}
    "{@ column.name @}": {@ {'str': '"text"', 'int': '3', 'float': '1.5', 'bool': 'True'}[column.type] @},
{@% endfor %@}
}
OTHER_BODY = {
{@% for column in columns %@}
    "{@ column.name @}": {@ {'str': '"other"', 'int': '4', 'float': '2.5', 'bool': 'False'}[column.type] @},
{@% endfor %@}
}
