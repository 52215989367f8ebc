package detect

import "strings"

// WithoutAddress removes the engine's address from a reason, because the sentence around it names
// the engine.
func WithoutAddress(why, where string) string {
	engine := engineOf(where)
	why = strings.NewReplacer("engine "+engine+": ", "", "dial tcp "+engine+": ", "").Replace(why)
	return strings.Replace(why, "connect: connect: ", "", 1)
}

// isShellSafe allows letters, digits and characters that mean nothing to a shell.
func isShellSafe(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		isLetter := 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		isDigit := '0' <= r && r <= '9'
		return !isLetter && !isDigit && !strings.ContainsRune(".:_[]/-", r)
	})
}

// engineOf returns the host:port of host:port/rank.
func engineOf(where string) string {
	engine, _, _ := strings.Cut(where, "/")
	return engine
}

// hostOf is empty if where is not of the form host:port, such as a model.
func hostOf(where string) string {
	engine := engineOf(where)
	colon := strings.LastIndexByte(engine, ':')
	if colon <= 0 {
		return ""
	}
	port := engine[colon+1:]
	isNumber := port != "" && strings.Trim(port, "0123456789") == ""
	if !isNumber {
		return ""
	}
	return engine[:colon]
}

// commonReasonOf leaves out what differs between engines: words with a digit, and names of their
// own host.
func commonReasonOf(why, host string) string {
	host = strings.ToLower(host)
	words := strings.Fields(strings.ToLower(why))
	common := words[:0] // in place
	for _, w := range words {
		if !strings.ContainsAny(w, "0123456789") && !namesHost(w, host) {
			common = append(common, w)
		}
	}
	return strings.Join(common, " ")
}

// namesHost: the word may also be the host with its domain or a port.
func namesHost(word, host string) bool {
	name := strings.Trim(word, `:;,."'()`)
	return host != "" && (name == host || strings.HasPrefix(name, host+".") || strings.HasPrefix(name, host+":"))
}
