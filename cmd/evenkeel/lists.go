package main

import (
	"reflect"
	"strings"
)

// spreadLists rewrites lists as argparse users type them, `--ports 1 2 3`, into
// repeated flags, `--ports=1 --ports=2 --ports=3`, which kong reads. A list ends
// at the next word that starts with "-"; nothing behind "--" is touched.
func spreadLists(args []string, lists map[string]bool) []string {
	out := make([]string, 0, len(args))
	flag := ""
	for i, word := range args {
		switch {
		case word == "--":
			return append(out, args[i:]...)
		case strings.HasPrefix(word, "-"):
			flag = ""
			if lists[word] && i+1 < len(args) && !strings.HasPrefix(args[i+1], "-") {
				flag = word
				continue
			}
			out = append(out, word)
		case flag != "":
			out = append(out, flag+"="+word)
		default:
			out = append(out, word)
		}
	}
	return out
}

// listFlags are the flags of a command whose field is a slice, by the names kong
// gives them.
func listFlags(command any) map[string]bool {
	flags := map[string]bool{}
	for _, f := range reflect.VisibleFields(reflect.TypeOf(command)) {
		if f.Type.Kind() != reflect.Slice {
			continue
		}
		name := f.Tag.Get("name")
		if name == "" {
			name = dashed(f.Name)
		}
		flags["--"+name] = true
		for alias := range strings.SplitSeq(f.Tag.Get("aliases"), ",") {
			if alias != "" {
				flags["--"+alias] = true
			}
		}
	}
	return flags
}

// dashed turns PrefillerHosts into prefiller-hosts, as kong does.
func dashed(name string) string {
	var b strings.Builder
	for i, r := range name {
		if i > 0 && r >= 'A' && r <= 'Z' {
			b.WriteByte('-')
		}
		b.WriteRune(r)
	}
	return strings.ToLower(b.String())
}
