import sys

from tasks import buy_label

for parcel in sys.argv[1:]:
    buy_label.delay(parcel)
