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
		isLetter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		isDigit := '0' <= r && r <= '9'
		return !isLetter && !isDigit && !strings.ContainsRune(".:_[]/-", r)
	})
}

// engineOf returns the host:port of an engine. where is this host:port itself, or a rank of the engine as host:port/rank.
func engineOf(where string) string {
	engine, _, _ := strings.Cut(where, "/")
	return engine
}

// hostOf is the host of an engine or a rank, from its host:port; empty: where is not of this form, such as the name of a model.
func hostOf(where string) string {
	engine := engineOf(where)
	colon := strings.LastIndexByte(engine, ':')
	if colon <= 0 { // no port, or no host
		return ""
	}
	port := engine[colon+1:]
	isNumber := port != "" && strings.Trim(port, "0123456789") == ""
	if !isNumber {
		return ""
	}
	return engine[:colon]
}

// commonReasonOf returns a reason in lower case, so that the findings of several engines can be compared. It leaves out words that differ
// between engines: words with a digit, such as addresses, and names of the engine's own host. host is empty if it is not known.
func commonReasonOf(why, host string) string {
	host = strings.ToLower(host)
	words := strings.Fields(strings.ToLower(why))
	common := words[:0] // filters words in place
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
