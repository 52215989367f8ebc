package main

import (
	"reflect"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
)

// spreadLists rewrites each list in the notation of Python's argparse, `--ports 1 2 3`, as repeated
// flags, `--ports=1 --ports=2 --ports=3`, which kong can read. A list ends at the next word that
// starts with "-" and is not a number. spreadLists also joins a negative number with the flag
// before it, because kong would read the number as a flag. It does not change words after "--".
func spreadLists(args []string, lists map[string]bool) []string {
	out := make([]string, 0, len(args))
	flag := "" // the flag to whose list the current words belong; empty: to none
	for i, word := range args {
		switch {
		case word == "--":
			return append(out, args[i:]...)
		case isFlag(word):
			flag = ""
			valueFollows := i+1 < len(args) && !isFlag(args[i+1])
			if lists[word] && valueFollows { // the flag itself is written later, before each of its values
				flag = word
				continue
			}
			out = append(out, word)
		case flag == "" && strings.HasPrefix(word, "-") && followsFlag(args, i):
			out[len(out)-1] += "=" + word // a negative number after its flag, which kong would refuse as an unknown flag
		case flag != "":
			out = append(out, flag+"="+word)
		default:
			out = append(out, word)
		}
	}
	return out
}

// followsFlag says whether the word before word i is a flag that has no value yet.
func followsFlag(args []string, i int) bool {
	return i > 0 && isFlag(args[i-1]) && !strings.Contains(args[i-1], "=")
}

// isFlag says whether a word begins with a dash and is neither a negative number nor "-" alone.
func isFlag(word string) bool {
	if !strings.HasPrefix(word, "-") || word == "-" {
		return false
	}
	_, err := strconv.ParseFloat(word, 64)
	return err != nil
}

// listFlags returns the flags, and their aliases, that take lists in the command that args names.
// The placeholder of such a flag ends in three dots.
func listFlags(root *kong.Node, args []string) map[string]bool {
	lists := map[string]bool{}
	if len(args) == 0 {
		return lists
	}
	command := subcommandOf(root, args[0])
	if command == nil {
		return lists
	}
	for _, f := range command.Flags {
		if strings.HasSuffix(f.PlaceHolder, " ...") {
			lists["--"+f.Name] = true
			for _, alias := range f.Aliases {
				lists["--"+alias] = true
			}
		}
	}
	return lists
}

// flagName returns the flag for a struct field under the name that kong gives it: --prefiller-hosts
// for PrefillerHosts.
func flagName(f reflect.StructField) string {
	if name := f.Tag.Get("name"); name != "" {
		return "--" + name
	}
	var b strings.Builder
	for i, r := range f.Name {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('-')
		}
		b.WriteRune(r)
	}
	return "--" + strings.ToLower(b.String())
}
