import sys

from labels import buy_label

for parcel in sys.argv[1:]:
    buy_label.send(parcel)
