package detect

import "strings"

// WithoutAddress removes the address of the engine named by where from a reason, because the sentence around it names the engine.
func WithoutAddress(why, where string) string {
	engine := engineOf(where)
	why = strings.NewReplacer("engine "+engine+": ", "", "dial tcp "+engine+": ", "").Replace(why)
	return strings.Replace(why, "connect: connect: ", "", 1)
}

// isShellSafe says whether a name can be written into a shell command: it has only letters, digits and characters that mean nothing to a
// shell.
func isShellSafe(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(".:_[]/-", r)
	})
}

// engineOf returns the host:port of an engine. where is this host:port itself, or a rank of the engine as host:port/rank.
func engineOf(where string) string {
	engine, _, _ := strings.Cut(where, "/")
	return engine
}

// hostOf is the host of an engine or a rank, from its host:port; empty: the name has no port.
func hostOf(where string) string {
	engine := engineOf(where)
	i := strings.LastIndexByte(engine, ':')
	if i <= 0 || i == len(engine)-1 || strings.Trim(engine[i+1:], "0123456789") != "" { // no host, no port, or a port that is no number
		return ""
	}
	return engine[:i]
}

// commonReasonOf returns a reason in lower case, so that the findings of several engines can be compared. It leaves out words that differ
// between engines: words with a digit, such as addresses, and names of the engine's own host. host is empty if it is not known.
func commonReasonOf(why, host string) string {
	host = strings.ToLower(host)
	words := strings.Fields(strings.ToLower(why))
	common := words[:0]
	for _, w := range words {
		if !strings.ContainsAny(w, "0123456789") && !namesHost(w, host) {
			common = append(common, w)
		}
	}
	return strings.Join(common, " ")
}

// namesHost says whether a word is the host, the host with its domain, or the host with a port.
func namesHost(word, host string) bool {
	name := strings.Trim(word, `:;,."'()`)
	return host != "" && (name == host || strings.HasPrefix(name, host+".") || strings.HasPrefix(name, host+":"))
}
