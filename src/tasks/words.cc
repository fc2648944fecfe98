#include "tasks/words.h"

#include <array>

namespace dualdecoder {
namespace {

using namespace std::string_view_literals;

constexpr std::array kNouns = {
    "anchor"sv,  "apple"sv,    "apron"sv,    "arrow"sv,    "barrel"sv,  "basket"sv,   "beacon"sv,
    "bell"sv,    "bench"sv,    "blanket"sv,  "boat"sv,     "bottle"sv,  "branch"sv,   "bread"sv,
    "brick"sv,   "bridge"sv,   "broom"sv,    "brush"sv,    "bucket"sv,  "butter"sv,   "button"sv,
    "cabinet"sv, "cable"sv,    "camera"sv,   "candle"sv,   "canoe"sv,   "carpet"sv,   "carriage"sv,
    "castle"sv,  "chain"sv,    "chair"sv,    "cheese"sv,   "chest"sv,   "chimney"sv,  "cloak"sv,
    "clock"sv,   "cloud"sv,    "coat"sv,     "coin"sv,     "compass"sv, "copper"sv,   "cotton"sv,
    "cradle"sv,  "crane"sv,    "crown"sv,    "curtain"sv,  "cushion"sv, "dagger"sv,   "desk"sv,
    "diamond"sv, "dish"sv,     "dragon"sv,   "drum"sv,     "eagle"sv,   "engine"sv,   "fabric"sv,
    "falcon"sv,  "feather"sv,  "fence"sv,    "fiddle"sv,   "flag"sv,    "flask"sv,    "flower"sv,
    "flute"sv,   "forge"sv,    "fossil"sv,   "fountain"sv, "fox"sv,     "funnel"sv,   "gallery"sv,
    "garment"sv, "gate"sv,     "glove"sv,    "goose"sv,    "grain"sv,   "guitar"sv,   "hammer"sv,
    "harness"sv, "harp"sv,     "hatchet"sv,  "heron"sv,    "honey"sv,   "horse"sv,    "jacket"sv,
    "jewel"sv,   "journal"sv,  "kettle"sv,   "kitchen"sv,  "kite"sv,    "knife"sv,    "ladder"sv,
    "lamp"sv,    "lantern"sv,  "leather"sv,  "lemon"sv,    "letter"sv,  "linen"sv,    "lion"sv,
    "locket"sv,  "machine"sv,  "magnet"sv,   "mantle"sv,   "marble"sv,  "market"sv,   "mask"sv,
    "medal"sv,   "mirror"sv,   "mountain"sv, "needle"sv,   "nest"sv,    "oar"sv,      "orange"sv,
    "organ"sv,   "otter"sv,    "oven"sv,     "owl"sv,      "paddle"sv,  "painting"sv, "paper"sv,
    "parcel"sv,  "pebble"sv,   "pencil"sv,   "pepper"sv,   "piano"sv,   "pillow"sv,   "pistol"sv,
    "planet"sv,  "plough"sv,   "pocket"sv,   "potato"sv,   "pump"sv,    "puzzle"sv,   "quilt"sv,
    "rabbit"sv,  "raven"sv,    "ribbon"sv,   "ring"sv,     "robe"sv,    "rocket"sv,   "rope"sv,
    "rudder"sv,  "saddle"sv,   "sail"sv,     "salmon"sv,   "scarf"sv,   "scissors"sv, "scroll"sv,
    "seal"sv,    "shawl"sv,    "shell"sv,    "shield"sv,   "shovel"sv,  "signal"sv,   "silver"sv,
    "sleeve"sv,  "spade"sv,    "spider"sv,   "spoon"sv,    "statue"sv,  "stove"sv,    "sugar"sv,
    "sword"sv,   "table"sv,    "tailor"sv,   "teapot"sv,   "thread"sv,  "thunder"sv,  "ticket"sv,
    "timber"sv,  "torch"sv,    "towel"sv,    "tractor"sv,  "trumpet"sv, "trunk"sv,    "tulip"sv,
    "turtle"sv,  "umbrella"sv, "vase"sv,     "velvet"sv,   "vessel"sv,  "violin"sv,   "wagon"sv,
    "wallet"sv,  "walnut"sv,   "watch"sv,    "wheel"sv,    "whistle"sv, "willow"sv,   "window"sv,
    "wolf"sv,    "yarn"sv,     "zebra"sv};

constexpr std::array kAdjectives = {
    "amber"sv,  "ancient"sv, "bitter"sv, "black"sv,   "blue"sv,    "bold"sv,    "bright"sv, "broken"sv,
    "brown"sv,  "calm"sv,    "cold"sv,   "crimson"sv, "crooked"sv, "dusty"sv,   "empty"sv,  "faded"sv,
    "gentle"sv, "golden"sv,  "green"sv,  "grey"sv,    "heavy"sv,   "hidden"sv,  "hollow"sv, "iron"sv,
    "large"sv,  "little"sv,  "lonely"sv, "narrow"sv,  "old"sv,     "painted"sv, "pale"sv,   "polished"sv,
    "purple"sv, "quiet"sv,   "round"sv,  "rusty"sv,   "sharp"sv,   "silent"sv,  "square"sv, "stolen"sv,
    "tall"sv,   "tiny"sv,    "warm"sv,   "white"sv,   "wild"sv,    "wooden"sv,  "yellow"sv, "young"sv};

constexpr std::array kNames = {
    "Agnes"sv,  "Albert"sv, "Anna"sv,   "Bertha"sv, "Carl"sv,   "Clara"sv,  "Daniel"sv, "Edith"sv,
    "Edwin"sv,  "Elsa"sv,   "Emil"sv,   "Fiona"sv,  "Frida"sv,  "George"sv, "Greta"sv,  "Hannah"sv,
    "Harold"sv, "Helen"sv,  "Hugo"sv,   "Ida"sv,    "Irene"sv,  "Jacob"sv,  "Johan"sv,  "Laura"sv,
    "Magnus"sv, "Martha"sv, "Nora"sv,   "Olaf"sv,   "Oscar"sv,  "Paula"sv,  "Peter"sv,  "Robert"sv,
    "Ruth"sv,   "Samuel"sv, "Sophie"sv, "Thomas"sv, "Ursula"sv, "Victor"sv, "Walter"sv, "Wilma"sv};

constexpr std::array kPlaces = {"harbour"sv, "village"sv,  "orchard"sv,    "mill"sv,     "chapel"sv,
                                "quarry"sv,  "station"sv,  "lighthouse"sv, "meadow"sv,   "bakery"sv,
                                "museum"sv,  "library"sv,  "valley"sv,     "island"sv,   "school"sv,
                                "garden"sv,  "workshop"sv, "farm"sv,       "tavern"sv,   "cemetery"sv,
                                "theatre"sv, "forest"sv,   "square"sv,     "tower"sv,    "dockyard"sv,
                                "inn"sv,     "bay"sv,      "monastery"sv,  "vineyard"sv, "river"sv};

}  // namespace

std::span<const std::string_view> nouns() { return kNouns; }
std::span<const std::string_view> adjectives() { return kAdjectives; }
std::span<const std::string_view> names() { return kNames; }
std::span<const std::string_view> places() { return kPlaces; }

}  // namespace dualdecoder
