package reload

import (
	"os"
	"runtime"
	"slices"

	"go.uber.org/zap"

	"evenkeel/gateway/config"
)

// privateFile is a file that nobody but this proxy should read.
type privateFile struct {
	key  string // in the config
	path string
}

// privateFiles are those that a config names.
func privateFiles(cfg *config.Config) []privateFile {
	all := []privateFile{
		{keyKeys, cfg.KeysFile}, {keyToken, cfg.Admin.TokenFile}, {keyPromptKey, cfg.Predictor.SecretFile},
		{keyTLS + ".key_file", cfg.TLS.KeyFile}, {keyAdminTLS + ".key_file", cfg.Admin.TLS.KeyFile},
		{keyGeoTLS + ".key", cfg.Geo.TLS.Key}, {keyGeoKeys, cfg.Geo.HMAC.KeysFile},
	}
	for name, p := range cfg.Profiles {
		all = append(all, privateFile{"profiles." + name + ".key_file", p.KeyFile})
	}
	return slices.DeleteFunc(all, func(f privateFile) bool { return f.path == "" })
}

// warnOfReaders warns of private files that every user of the machine can read.
func (r *Reloader) warnOfReaders(files ...privateFile) {
	for _, f := range files {
		info, err := os.Stat(f.path) // the code that needs the file reports a missing one
		if err == nil && info.Mode().Perm()&0o004 != 0 && runtime.GOOS != "windows" {
			r.host.Log.Warn("every user of this machine can read a private file; take the right from others with chmod o-r, or set defaultMode: 0440 where Kubernetes mounts it",
				zap.String("config", f.key), zap.String("file", f.path))
		}
	}
}
